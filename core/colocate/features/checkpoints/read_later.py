"""What the second half of a role's `save` reads that its calls may change, as far as its own code tells."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Generator, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from colocate._system.imported import imported
from colocate._values.leaving import Watch

_KINDS = ("Tensor", "ndarray", "dict", "list", "tuple")  # of what tensors and arrays are watched in
_PLAIN = (int, float, complex, bool, str, bytes)  # a new one that is equal is as good


class ReadLater:
    """Variables of a generator, and attributes of the role, that it reads from here on; as they are now.

    What functions read that it calls isn't known.
    """

    def __init__(self, rest: Generator[Any, Any, Any], role: object, strict: bool) -> None:
        """Args: strict: Whether contents are compared, too."""
        self._own: Mapping[str, Any] = getattr(role, "__dict__", {})
        self._attributes: dict[str, Any] = {}
        self._watches: list[tuple[str, Watch]] = []
        for frame in _frames(rest):
            for name, value in variables(frame).items():
                self._watches.append((name, Watch(value, strict)))
            for name, is_saved in attributes(frame, role).items():
                if name in self._own:  # no method, and no property, as `ctx` is
                    value = self._attributes[name] = self._own[name]
                    held = _held(value) if is_saved else value
                    if _is_watched(held):
                        self._watches.append((f"self.{name}", Watch(held, strict)))

    def changed(self) -> list[str]:
        """Return the names of those that are others now, or in which something has changed."""
        others = (f"self.{name}" for name, then in self._attributes.items() if self._is_other(name, then))
        return [*dict.fromkeys([*others, *(name for name, watch in self._watches if watch.written())])]

    def _is_other(self, name: str, then: Any) -> bool:
        now = self._own.get(name, self)
        return now is not then and not (type(now) is type(then) and isinstance(now, _PLAIN) and now == then)


def _frames(rest: Any) -> Iterator[FrameType]:
    while inspect.isgenerator(rest) and rest.gi_frame is not None:
        yield rest.gi_frame
        rest = rest.gi_yieldfrom


def variables(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables of a frame that its code reads from here on, before it sets them anew, by name."""
    first: dict[str, bool] = {}  # whether the first thing done to each is to read it
    for each in dis.get_instructions(frame.f_code):
        if each.offset > frame.f_lasti and any(kind in each.opname for kind in ("_FAST", "DEREF", "CLOSURE")):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            steps = [step for step in each.opname.split("_") if step in ("LOAD", "STORE", "DELETE", "CLEAR")]
            for name, step in zip(names, steps, strict=False):
                if steps[-1] != "CLEAR":  # else it is put aside, as a comprehension has one of its name
                    first.setdefault(name, step == "LOAD")
    return {name: value for name, value in frame.f_locals.items() if first.get(name) and _is_watched(value)}


def attributes(frame: FrameType, role: object) -> Mapping[str, bool]:
    """Return the role's attributes that a frame's code reads from here on, and doesn't set itself.

    By name, and whether it is their `state_dict` that is read.
    """
    read: dict[str, bool] = {}
    own: set[str] = set()
    _look(frame.f_code, frame.f_lasti, {name for name, value in frame.f_locals.items() if value is role}, read, own)
    return {name: is_saved for name, is_saved in read.items() if name not in own}


def _look(code: CodeType, after: int, roles: Collection[str], read: dict[str, bool], own: set[str]) -> None:
    """Note what attributes of variables that are the role are read, and which ones are set."""
    variable: str | None = None  # what lies on the top of the stack
    attribute: str | None = None
    is_copied = False  # as by `self.count += 1`
    for each in dis.get_instructions(code):
        argument: Any = each.argval
        if each.offset <= after or each.opname == "EXTENDED_ARG":
            continue
        if isinstance(each.argval, CodeType):  # a function, or a comprehension
            _look(each.argval, -1, {*roles} & {*each.argval.co_freevars}, read, own)
        former, attribute = attribute, None
        if each.opname.endswith(("_ATTR", "_METHOD")) and variable in roles:
            if each.opname.startswith("LOAD") and not is_copied:
                attribute = argument
                read.setdefault(argument, False)
            else:
                own.add(argument)
        elif former is not None and argument == "state_dict":
            read[former] = True
        is_copied = each.opname == "COPY"
        if not is_copied:
            names = argument if isinstance(argument, tuple) else (argument,)
            variable = names[-1] if "LOAD_FAST" in each.opname or each.opname == "LOAD_DEREF" else None


def _is_watched(value: Any) -> bool:
    return any(each.__name__ in _KINDS for each in type(value).__mro__)


def _held(value: Any) -> Any:
    """Return the tensors that are in the `state_dict` of a module, or change with that of an optimizer."""
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return [*(each for group in value.param_groups for each in group["params"]), *value.state.values()]
    return value
