"""Lots: definitions that travel together, and what each receiver has been sent of them.

Definitions that are met together go in one pickle, because classes name each other. With them go the values of the
globals that their code names, as they are then. A change is a name that has another object now; that is found by
identity, by looking at the names alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from colocate._definitions import known
from colocate._definitions.codec import pickler_for
from colocate._definitions.explain import advice, deepest, kind_and_cause
from colocate._definitions.known import Definition, Global, Links, Need, Space
from colocate._definitions.making import make_known
from colocate._definitions.packed import Packed
from colocate._definitions.pickler import Pickler
from colocate._definitions.scout import Scout, code_last, is_code
from colocate._system.tracebacks import without_own_frames
from colocate.errors import SerializationError


class Lot:
    """What is sent to a receiver that lacks something.

    Attributes:
        body: The pickle.
        definitions: What is in it, by id.
        values: The globals whose values are in it.
        others: What it names that the receiver has been sent before, by id.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._named: list[Need] = []  # what code of the piece that is pickled now names
        self._named_by: dict[int, list[Need]] = {}  # the same of pieces that are in it, by their definitions' ids
        self.definitions: dict[int, Definition] = {}
        self.values: dict[Global, Any] = {}
        self.others: dict[int, Definition] = {}
        self.body = Packed(b"")

    @property
    def ids(self) -> tuple[int, ...]:
        """What its receiver knows then."""
        return tuple(self.definitions)

    @property
    def names(self) -> tuple[tuple[str | int, str], ...]:
        """The globals in it, as they are called there."""
        return tuple((self.key_of(name.space), name.name) for name in self.values)

    def key_of(self, space: Space) -> str | int:
        """What a space is called at its receiver."""
        return self._receiver.key_of(space)

    def has_to_have(self, definition: Definition) -> bool:
        """Whether a definition that is met travels in this lot; otherwise it is named."""
        if definition.id in self._receiver.knows:
            self.others[definition.id] = definition
            return False
        self.definitions[definition.id] = definition
        self._named_by[definition.id] = self._named
        return True

    def will_need(self, found: Need) -> None:
        """Something that what is in it refers to."""
        self._named.append(found)

    def take_named(self) -> list[Need]:
        """What was met so since this was asked last."""
        named, self._named = self._named, []
        return named

    def pack(self, needs: Iterable[Need]) -> None:
        """Make the body.

        Rebuilding a value runs code of its class (`__hash__`, `__setstate__`), so what that code names comes before
        the value, and the receiver binds each name as it comes. Where two need each other, one of them is the first.

        Raises:
            SerializationError: Something in it can't be pickled.
        """
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickler_for(file, buffers.append, self)
        begun: set[Need] = set()
        todo = [(need, False) for need in needs]  # the last comes first; whether what it is rebuilt with has come
        while todo:
            need, is_ready = todo.pop()
            if isinstance(need, Definition):
                if need.id in self.definitions or need.id in self._receiver.knows:
                    continue
                value, name = need.object, getattr(need.object, "__name__", "it")
                is_first = known.definition_of(value).id == need.id
                piece, what, words = value if is_first else _Also(need.id, value), _name(value), _words(value)
            else:
                if need in self.values or not self._receiver.lacks_value(need):
                    continue
                value, name, module = need.value, need.name, str(need.space.names.get("__name__", ""))
                piece = self.key_of(need.space), module, name, value
                what = words = f"the global {name!r} of {need.space.names.get('__name__')}, which {need.user} names,"
            if need not in begun:
                begun.add(need)
                todo.append((need, True))
                todo += ((each, False) for each in self._before(need, value, what, name))
            elif is_ready or is_code(value):  # otherwise it needs itself
                if isinstance(need, Global):
                    self.values[need] = value
                elif isinstance(piece, _Also):
                    self.definitions[need.id] = need
                self._named = []
                pickler.dump(words)
                _dump(pickler, piece, what, name)
                todo += ((each, False) for each in code_last(self._named))
        pickler.dump(None)
        self.body = Packed(file.getvalue(), tuple(buffer.raw() for buffer in buffers))
        links = Links(self.values, self.others.values())
        for definition in self.definitions.values():
            definition.links = links
        for name in self.values:
            name.links = links

    def _before(self, need: Need, value: Any, what: str, name: str) -> list[Need]:
        """What has to be there before something is rebuilt: the classes in it, and all that their code names."""
        scout = Scout(need if isinstance(need, Definition) else None)
        _dump(pickler_for(io.BytesIO(), lambda buffer: None, scout), value, what, name)
        found: list[Need] = []
        for each in scout.met:
            if isinstance(each, Global) or (each.id not in self._named_by and each.id not in self._receiver.knows):
                found.append(each)
            elif not (isinstance(need, Global) and is_code(value)):  # none of it runs when a name is bound to it
                # What was sent before may name something else now.
                found += self._named_by[each.id] if each.id in self._named_by else self._receiver.lacks((each,))
        return code_last(found)


class _Also:
    """Another id of what has one already: a class that several processes get of a generic one, each for itself."""

    def __init__(self, id: int, thing: Any) -> None:
        self._known = id, thing

    def __reduce__(self) -> Any:
        return make_known, self._known


def _words(thing: Any) -> str:
    """What a definition is called where it can't be rebuilt."""
    kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "object"
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"the {kind} {name} of {getattr(thing, '__module__', None)}"


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', thing)}"


def _dump(pickler: Pickler, thing: Any, what: str, name: str) -> None:
    try:
        pickler.dump(thing)
    except Exception as error:
        if isinstance(error, SerializationError):
            raise
        value = thing[-1] if isinstance(thing, tuple) else thing
        path, culprit, cause = deepest(value, name, error, _dump_alone)
        why = f"{type(error).__name__}: {error}"
        if culprit is not value:
            why = f"{path} is {kind_and_cause(culprit, cause)}"
        instead = advice(
            culprit, "Make it inside the role, or have it in a module beside the script, which the workers import"
        )
        if hasattr(value, "_torchdynamo_orig_callable"):
            why = f"it is what torch.compile makes of a function ({why})"
        raise SerializationError(
            f"{what} goes to the workers with the script's code, and can't be pickled: {why}. {instead}",
            argument=what,
            path=path,
        ) from without_own_frames(error)


def _dump_alone(thing: Any) -> None:
    """Pickle something with the definitions in it, but not the globals that they name."""
    pickler_for(io.BytesIO(), lambda buffer: None, Lot(Receiver("another"))).dump(thing)


# What the receiver of definitions is to the script: a worker, whose `__main__` is the script's; the driver that runs
# it, whose names nobody but the script itself sets; or another one, which has a script of its own.
Script: TypeAlias = Literal["is given it", "runs it", "another"]


class Receiver:
    """What one process has been sent, and therefore knows.

    Attributes:
        knows: The ids.
        values: What names were when they were last sent to it.
    """

    def __init__(self, script: Script) -> None:
        """Args: script: What it is to the script."""
        self.knows: set[int] = set()
        self.values: dict[Global, Any] = {}
        self._lost: set[Global] = set()
        self._is_script = script == "runs it"
        self._main: str | int = known.new_id() if script == "another" else "__main__"

    def key_of(self, space: Space) -> str | int:
        """What a space is called there."""
        return self._main if space.key == "__main__" else space.key

    def lacks_value(self, name: Global) -> bool:
        """Whether a name is something else there."""
        if self._is_script and name.space.key == "__main__":
            return False
        # self: nothing has been sent
        return self.values.get(name, self) is not name.value or name in self._lost

    def lacks(self, needs: Iterable[Need]) -> list[Need]:
        """What has to be sent before a message that needs this."""
        todo, found = list(needs), []
        seen: set[Links] = set()
        while todo:
            need = todo.pop()
            if need.id not in self.knows if isinstance(need, Definition) else self.lacks_value(need):
                found.append(need)
            elif (links := need.links) is not None and links not in seen:
                seen.add(links)
                todo += links.globals
                todo += [each for each in links.others if each.links is not None]
        return found

    def lot(self, lacking: Sequence[Need]) -> Lot:
        """What it lacks, to be sent to it."""
        lot = Lot(self)
        lot.pack(lacking)
        return lot

    def takes(self, lot: Lot) -> bool:
        """Whether a lot that was made for another one, which lacked the same, suits this one too."""
        return self.knows.issuperset(lot.others) and self.knows.isdisjoint(lot.definitions)

    def has_got(self, lot: Lot) -> None:
        """The lot has been sent to it."""
        self.knows.update(lot.definitions)
        self.values.update(lot.values)
        self._lost.difference_update(lot.values)

    def lost_all(self, ids: Iterable[int], names: Iterable[tuple[str | int, str]]) -> set[Global]:
        """A lot that was sent couldn't be rebuilt there; returns the globals in it."""
        self.knows.difference_update(ids)
        called = set(names)
        lost = {name for name in self.values if (self.key_of(name.space), name.name) in called}
        self._lost |= lost
        return lost
