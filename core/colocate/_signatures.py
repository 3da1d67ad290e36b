"""Whether plain values fit a signature: strict about scalars, silent about types that a config can't know."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, NewType, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

import attrs

from colocate._system.nearest import nearest
from colocate._system.numbers import amount_problem, duration_problem, gpus_problem, ports_problem
from colocate._system.room import spill_problem

Place: TypeAlias = tuple[str | int, ...]
"""Where in a config something is: keys and indices from its top."""

_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((float, int), "a number"),
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    None: ((types.NoneType,), "null"),
    types.NoneType: ((types.NoneType,), "null"),
}
_LISTS = (list, Sequence)
_MAPPINGS = (dict, Mapping)


@attrs.frozen
class Problem:
    """What is wrong with a value, and where inside it."""

    place: Place
    message: str
    nearest: str | None = None


@attrs.frozen
class Checked:
    """A note of an `Annotated` kind: values have to be more than of that kind.

    Attributes:
        problem: What is wrong with a value, in words; None when nothing is. Isn't asked of None.
    """

    problem: Callable[[Any], str | None]


@attrs.frozen
class Arguments:
    """Parameters that can be given by name.

    Attributes:
        owner: What messages call the thing they belong to.
        parameters: By name, without `self` and whatever the caller gives itself.
        hints: The annotations that could be evaluated.
        open: Whether any other name is accepted too.
    """

    owner: str
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    open: bool

    def problems(self, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what doesn't fit: unknown, missing, of a wrong simple type."""
        meant = set()  # by names that are misspelt: they aren't missing besides
        for name, value in given.items():
            if name in self.parameters:
                yield from problems(value, self.hints.get(name, Any), (name,))
            elif not self.open:
                near = nearest(name, self.parameters)
                meant.add(near)
                takes = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes none"
                text = f"{self.owner} has no parameter {name!r}"
                yield Problem((name,), text if near else f"{text}; {takes}", near)
        for name, parameter in self.parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in given and name not in meant:
                hint = self.hints.get(name)
                kind = f" ({hint.__name__})" if isinstance(hint, type) else ""
                yield Problem((), f"{self.owner} needs {name!r}{kind}")

    def built(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same, with what is annotated as a dataclass, or a class of attrs, made from the mapping of it."""
        return {name: built(value, self.hints.get(name, Any)) for name, value in given.items()}


def arguments_of(target: Callable[..., Any], owner: str, skip: int = 0) -> Arguments:
    """Return what a class or function takes by name."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):  # some written in C have no signature: nothing is known
        return Arguments(owner, {}, {}, open=True)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in by_name}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return Arguments(owner, named, _hints(target, named), takes_any)


def path_text(place: Place) -> str:
    """Return a place as people write it: `groups.policy.roles.actor.slots[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".")


def problems(value: Any, annotation: Any, place: Place = ()) -> Iterator[Problem]:
    """Yield everything about a value that doesn't fit an annotation; nothing for annotations that can't be judged."""
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        found = list(problems(value, kind, place))
        # What a check says of a number goes first, also where its kind is wrong: it knows why.
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and (number or not found):
            checks = [note.problem for note in notes if isinstance(note, Checked)]
            found = [Problem(place, said) for check in checks if (said := check(value)) is not None] or found
        yield from found
        return
    annotation = _bare(annotation)
    origin = get_origin(annotation) or annotation
    args = get_args(annotation)
    if annotation in _SCALARS:
        accepted, wanted = _SCALARS[annotation]
        if not isinstance(value, accepted) or (annotation is not bool and isinstance(value, bool)):
            hint = ""
            if annotation is str and isinstance(value, int | float):
                hint = "; put it in quotes"
            elif isinstance(value, str) and annotation in (int, float):
                with suppress(ValueError):  # it is none
                    float(value)
                    hint = "; remove the quotes"
            yield Problem(place, f"must be {wanted}, not {shown(value)}{hint}")
    elif origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            names = [choice for choice in args if isinstance(choice, str)]
            near = nearest(value, names) if isinstance(value, str) else None
            yield Problem(place, f"must be {describe(annotation)}, not {shown(value)}", near)
    elif origin in (Union, types.UnionType):
        of_arms = [list(problems(value, arm, place)) for arm in args]
        if not all(of_arms):
            return
        # An arm of the value's own kind (a list, a mapping) knows best what is wrong inside it.
        deeper = [each for each in of_arms if all(problem.place != place for problem in each)]
        if deeper:
            yield from min(deeper, key=len)
        elif len(real := [arm for arm in args if arm is not types.NoneType]) == 1:
            yield from problems(value, real[0], place)
        else:
            yield Problem(place, f"must be {describe(annotation)}, not {shown(value)}")
    elif origin in _LISTS:
        if not isinstance(value, list):
            yield Problem(place, f"must be a list, not {shown(value)}")
            return
        for i, each in enumerate(value):
            yield from problems(each, args[0] if args else Any, (*place, i))
    elif origin in _MAPPINGS:
        if not isinstance(value, dict):
            yield Problem(place, f"must be a mapping, not {shown(value)}")
            return
        for key, each in value.items():
            yield from problems(each, args[1] if args else Any, (*place, key))
    elif _is_record(origin) and not isinstance(value, origin):  # it is one in a config that is written in Python
        arguments = arguments_of(origin, origin.__name__)
        if not isinstance(value, dict):
            yield Problem(place, f"must be a mapping ({', '.join(arguments.parameters)}), not {shown(value)}")
            return
        found = [attrs.evolve(each, place=(*place, *each.place)) for each in arguments.problems(value)]
        if not found:
            try:
                built(value, origin)
            except Exception as error:  # what the class itself has against it
                found.append(Problem(place, f"{origin.__name__} refuses it: {type(error).__name__}: {error}"))
        yield from found


def built(value: Any, annotation: Any) -> Any:
    """Return a value that fits its annotation as that wants it: mappings that stand for instances are made such."""
    annotation = _bare(annotation)
    origin = get_origin(annotation) or annotation
    if origin in (Union, types.UnionType):
        fitting = (arm for arm in get_args(annotation) if not any(problems(value, arm)))
        return built(value, next(fitting, Any))
    if origin in _LISTS and isinstance(value, list):
        (item,) = get_args(annotation) or (Any,)
        return [built(each, item) for each in value]
    if origin in _MAPPINGS and isinstance(value, dict):
        _, item = get_args(annotation) or (Any, Any)
        return {key: built(each, item) for key, each in value.items()}
    if not _is_record(origin) or not isinstance(value, dict):
        return value
    record: Any = origin
    return record(**arguments_of(record, record.__name__).built(value))


def describe(annotation: Any) -> str:
    """Return what an annotation wants, in words."""
    annotation = _bare(annotation)
    origin = get_origin(annotation) or annotation
    if annotation in _SCALARS:
        return _SCALARS[annotation][1]
    if origin is Literal:
        return " or ".join(repr(each) for each in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(each) for each in get_args(annotation)))
    if origin in _LISTS:
        return "a list"
    return "a mapping" if origin in _MAPPINGS else str(getattr(annotation, "__name__", annotation))


def brief(text: str, limit: int = 100) -> str:
    """Return a text that somebody has given, as a message shows it: not more of it than one reads."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def shown(value: Any) -> str:
    """Return a value as a message shows it, with its kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"the text {brief(repr(value))}" if isinstance(value, str) else brief(repr(value))


def _is_record(kind: Any) -> bool:
    """Return whether a class is a dataclass, or one of attrs."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or attrs.has(kind))


def _bare(annotation: Any) -> Any:
    """Return what an annotation says without notes and new names; Any for what can't be judged."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        else:
            break
    try:
        hash(annotation)
    except TypeError:
        return Any
    return Any if annotation is inspect.Parameter.empty else annotation


def _hints(target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the annotations as types; one that can't be evaluated (imported for type checkers only) is left out."""
    function = inspect.unwrap(cast(Any, target).__init__ if isinstance(target, type) else target)
    names = getattr(function, "__globals__", {})
    if _is_record(target):  # attrs makes such a function in a place of its own
        names = vars(sys.modules.get(target.__module__, builtins))
    found = {}
    for name, parameter in parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            continue
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            found[name] = get_type_hints(holder, globalns=names)[name]
        except Exception:  # annotations are code: they may raise anything
            continue
    return found


# Of every executor that has options of these names.
_CHECKED: Mapping[str, Callable[[Any], str | None]] = {
    "cpus": amount_problem,
    "gpus": gpus_problem,
    "timeout": duration_problem,
    "collective_timeout": partial(duration_problem, positive=True),
    "spill_dir": spill_problem,
    "ports": ports_problem,
}


def options_of(executor: type) -> Arguments:
    """Return the options of an executor's own: the parameters of its `connect`, or else of its constructor."""
    from colocate.executor import Executor

    assert issubclass(executor, Executor)
    inherited = inspect.unwrap(executor.connect).__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    found = arguments_of(executor if inherited else executor.connect, f"executor {executor.name!r}")
    checked = {name: Annotated[found.hints.get(name, Any), Checked(check)] for name, check in _CHECKED.items()}
    return attrs.evolve(found, hints={**found.hints, **checked})
