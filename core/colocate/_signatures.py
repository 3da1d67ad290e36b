"""Check a config's plain values against signatures, and convert the values for the annotations."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import datetime
import enum
import inspect
import numbers
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    NotRequired,
    Required,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import attrs

from colocate._definitions.names import ALIASES
from colocate._system.nearest import find_nearest
from colocate._system.numbers import find_amount_problem, find_duration_problem, find_gpus_problem, find_ports_problem
from colocate._system.room import find_spill_problem

Place: TypeAlias = tuple[str | int, ...]
"""A place in a config: keys and indices from the top."""

_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((float, int), "a number"),
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    None: ((types.NoneType,), "null"),
    types.NoneType: ((types.NoneType,), "null"),
}
_ABC = collections.abc
# `_LISTS` maps annotations to the conversion of a config's list; `_MAPPINGS` has the annotations of mappings.
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    **dict.fromkeys((list, _ABC.Sequence, _ABC.MutableSequence, _ABC.Collection, _ABC.Iterable), list),
    **dict.fromkeys((set, _ABC.Set, _ABC.MutableSet), set),
    frozenset: frozenset,
    collections.deque: collections.deque,
}
_MAPPINGS = (dict, _ABC.Mapping, _ABC.MutableMapping)
_PLAIN = (str, bool, int, float, types.NoneType, list, dict)  # A config's values have only these types.
_DATES = {
    datetime.datetime: "a date and time, as in '2026-11-29T10:00'",
    datetime.date: "a date, as in '2026-11-29'",
    datetime.time: "a time, as in '10:00'",
}


@attrs.frozen
class Problem:
    """An error in a config's value: the path inside the value, and a message for the user."""

    place: Place
    message: str
    nearest: str | None = None


@attrs.frozen
class Checked:
    """An additional check of a value, written as a note in an `Annotated` annotation.

    Attributes:
        problem: Returns a value's problem in words; None for a good value. Not called for None.
    """

    problem: Callable[[Any], str | None]


@attrs.frozen
class Arguments:
    """The parameters that a class or function accepts by name.

    Attributes:
        owner: Name of the parameters' owner in messages.
        parameters: By name, without `self` and the caller's own arguments.
        hints: The annotations that could be evaluated.
        open: Whether any other name is accepted too.
        rest_hint: The annotation of other names.
    """

    owner: str
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    open: bool
    rest_hint: Any = Any

    def problems(self, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the errors in the given arguments: unknown names, missing names, and values of a wrong type."""
        yield from self._convert(given, ())[1]

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, each converted for the parameter's annotation (see the function `convert`)."""
        return self._convert(given, ())[0]

    def _convert(self, given: Mapping[str, Any], place: Place) -> tuple[dict[str, Any], list[Problem]]:
        converted: dict[str, Any] = {}
        wrong: list[Problem] = []
        meant = set()  # A parameter with a misspelt name isn't also reported as missing.
        for name, value in given.items():
            hint = self.hints.get(name, Any if name in self.parameters else self.rest_hint)
            converted[name] = _convert(value, hint, (*place, name), wrong)
            if name not in self.parameters and not self.open:
                near = find_nearest(name, self.parameters)
                meant.add(near)
                takes = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes none"
                text = f"{self.owner} has no parameter {name!r}"
                wrong.append(Problem((*place, name), text if near else f"{text}; {takes}", near))
        for name, parameter in self.parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in given and name not in meant:
                hint = self.hints.get(name)
                kind = f" ({hint.__name__})" if isinstance(hint, type) else ""
                wrong.append(Problem(place, f"{self.owner} needs {name!r}{kind}"))
        return converted, wrong


def arguments_of(target: Callable[..., Any], owner: str, skip: int = 0) -> Arguments:
    """Return the parameters that a class or function accepts by name."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return Arguments(owner, {}, {}, open=True)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in by_name}
    rest = {parameter.name: parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD}
    hints = _evaluate_hints(target, named | rest)
    rest_hint = next((hints.pop(name) for name in rest if name in hints), Any)
    return Arguments(owner, named, hints, bool(rest), rest_hint)


def path_text(place: Place) -> str:
    """Format the path of a value in a config, such as `groups.policy.roles.actor.slots[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".")


def problems(value: Any, annotation: Any, place: Place = ()) -> Iterator[Problem]:
    """Yield the reasons why a value doesn't fit an annotation. Annotations that can't be checked fit any value."""
    wrong: list[Problem] = []
    _convert(value, annotation, place, wrong)
    yield from wrong


def convert(value: Any, annotation: Any) -> Any:
    """Convert a value for an annotation, for example a text to a `Path`, or a list to a set."""
    return _convert(value, annotation, (), [])


def _convert(value: Any, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    if get_origin(annotation) is Annotated:
        return _convert_annotated(value, annotation, place, wrong)
    annotation = _strip_annotation(annotation)
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if annotation in _SCALARS:
        if (text := _scalar_problem(value, annotation)) is not None:
            wrong.append(Problem(place, text))
        return value
    if origin is Literal:
        return _convert_choice(value, args, place, wrong)
    if origin in (Union, types.UnionType):
        return _convert_union(value, annotation, place, wrong)
    if origin is Any or not isinstance(origin, type):
        return value
    if type(value) not in _PLAIN:  # The value comes from Python code, not from a config file.
        return value
    if issubclass(origin, enum.Enum):
        return _convert_choice(value, tuple(origin), place, wrong)
    if is_typeddict(origin):
        return _convert_typed_dict(value, origin, place, wrong)
    if _is_record(origin):
        return _convert_record(value, origin, place, wrong)
    if origin in _LISTS or origin is tuple:
        return _convert_list(value, origin, args, place, wrong)
    if origin in _MAPPINGS:
        if not isinstance(value, dict):
            wrong.append(Problem(place, f"must be a mapping, not {shown(value)}"))
            return value
        of_key, of_value = args or (Any, Any)
        return {
            _convert_key(key, of_key, place, wrong): _convert(item, of_value, (*place, key), wrong)
            for key, item in value.items()
        }
    return _convert_instance(value, origin, place, wrong)


def _convert_annotated(value: Any, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    kind, *notes = get_args(annotation)
    kind_problems: list[Problem] = []
    converted = _convert(value, kind, place, kind_problems)
    # A number is checked even if its type is wrong, because the check's message explains more.
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and (number or not kind_problems):
        checks = [note.problem for note in notes if isinstance(note, Checked)]
        kind_problems = [
            Problem(place, text) for check in checks if (text := check(value)) is not None
        ] or kind_problems
    wrong += kind_problems
    return converted


def _scalar_problem(value: Any, annotation: Any) -> str | None:
    accepted, kind_text = _SCALARS[annotation]
    if isinstance(value, accepted) and (annotation is bool or not isinstance(value, bool)):
        return None
    hint = ""
    if annotation is str and isinstance(value, int | float):
        hint = "; put it in quotes"
    elif isinstance(value, str) and annotation in (int, float):
        with suppress(ValueError):
            float(value)
            hint = "; remove the quotes"
    return f"must be {kind_text}, not {shown(value)}{hint}"


def _config_value(choice: Any) -> Any:
    """Return a choice in a config's notation: for an enumeration's member, the value if plain, or else the name."""
    if not isinstance(choice, enum.Enum):
        return choice
    return choice.value if type(choice.value) in _PLAIN else choice.name


def _convert_choice(value: Any, choices: Sequence[Any], place: Place, wrong: list[Problem]) -> Any:
    """Return the choice that a value names. An enumeration's member can be given by value or by name."""
    plain_choices = [_config_value(choice) for choice in choices]
    for choice, plain_choice in zip(choices, plain_choices, strict=True):
        if value is choice or (value == plain_choice and type(value) is type(plain_choice)):
            return choice
    for choice in choices:
        if isinstance(choice, enum.Enum) and value == choice.name:
            return choice
    near = (
        find_nearest(value, [plain_choice for plain_choice in plain_choices if isinstance(plain_choice, str)])
        if isinstance(value, str)
        else None
    )
    wrong.append(
        Problem(place, f"must be {brief(' or '.join(map(repr, plain_choices)), 500)}, not {shown(value)}", near)
    )
    return value


def _convert_union(value: Any, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    arms, of_arms = get_args(annotation), list[list[Problem]]()
    for arm in arms:
        arm_problems: list[Problem] = []
        converted = _convert(value, arm, place, arm_problems)
        if not arm_problems:
            return converted
        of_arms.append(arm_problems)
    # Prefer a union member that accepts the value itself, and only has problems with nested values.
    deeper = [problem_list for problem_list in of_arms if all(problem.place != place for problem in problem_list)]
    real = [problem_list for arm, problem_list in zip(arms, of_arms, strict=True) if arm is not types.NoneType]
    if deeper:
        best = min(deeper, key=len)
        wrong += best
    elif len(real) == 1:
        wrong += real[0]
    else:
        wrong.append(Problem(place, f"must be {describe(annotation)}, not {shown(value)}"))
    return value


def _convert_list(value: Any, kind: Any, args: tuple[Any, ...], place: Place, wrong: list[Problem]) -> Any:
    if not isinstance(value, list):
        wrong.append(Problem(place, f"must be a list, not {shown(value)}"))
        return value
    whole = kind is tuple and args and args[-1:] != (...,)
    if whole and len(args) != len(value):
        wrong.append(Problem(place, f"must be a list of {len(args)}, not of {len(value)}"))
        return value
    kinds = args if whole else (args or (Any,))[:1] * len(value)
    before = len(wrong)
    items = [_convert(item, of, (*place, i), wrong) for i, (item, of) in enumerate(zip(value, kinds, strict=True))]
    try:
        return items if len(wrong) > before else tuple(items) if kind is tuple else _LISTS[kind](items)
    except TypeError as error:  # The items of a set must be hashable.
        wrong.append(Problem(place, f"must be a list of what can be in a set: {error}"))
        return value


def _convert_key(key: str, annotation: Any, place: Place, wrong: list[Problem]) -> Any:
    """Convert a mapping's key for an annotation. A config's keys are always text, even if annotated as a number."""
    kind = _strip_annotation(annotation)
    if kind in (int, float):
        try:
            return kind(key)
        except ValueError:
            wrong.append(Problem((*place, key), f"the key must be {_SCALARS[kind][1]}, not {shown(key)}"))
            return key
    return _convert(key, annotation, (*place, key), wrong)


def _convert_typed_dict(value: Any, kind: Any, place: Place, wrong: list[Problem]) -> Any:
    hints = _evaluate_annotations(kind.__annotations__, vars(sys.modules.get(kind.__module__, builtins)))
    parameters = {}
    for name in kind.__annotations__:
        # `__required_keys__` overlooks a NotRequired inside an annotation that is written as text.
        needed = name in kind.__required_keys__ and get_origin(hints.get(name)) is not NotRequired
        default = inspect.Parameter.empty if needed else None
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    return _convert_mapping(value, Arguments(kind.__name__, parameters, hints, open=False), place, wrong)


def _convert_mapping(value: Any, arguments: Arguments, place: Place, wrong: list[Problem]) -> Any:
    if not isinstance(value, dict):
        wrong.append(Problem(place, f"must be a mapping ({', '.join(arguments.parameters)}), not {shown(value)}"))
        return value
    converted, mapping_problems = arguments._convert(value, place)
    wrong += mapping_problems
    return converted


def _convert_record(value: Any, kind: Any, place: Place, wrong: list[Problem]) -> Any:
    before = len(wrong)
    fields = _convert_mapping(value, arguments_of(kind, kind.__name__), place, wrong)
    if len(wrong) > before:
        return value
    try:
        return kind(**fields)
    except Exception as error:  # The class's constructor has refused the arguments.
        wrong.append(Problem(place, f"{kind.__name__} refuses it: {type(error).__name__}: {error}"))
        return value


def _convert_instance(value: Any, kind: type, place: Place, wrong: list[Problem]) -> Any:
    """Convert a text to an instance of a class. Other values must be instances already, and are returned."""
    try:
        if isinstance(value, kind):
            return value
    except TypeError:  # `isinstance` refuses protocols that aren't runtime-checkable.
        return value
    if describe(kind) == kind.__name__:
        text = f"must be of the class {kind.__name__}, which a config can't say, not {shown(value)}: "
        wrong.append(Problem(place, f"{text}annotate what it is made of, a text or a number, and make it of that"))
        return value
    text = f"must be {describe(kind)}, not {shown(value)}"
    if isinstance(value, str):
        try:
            return _parse_text(value, kind)
        except (ValueError, RuntimeError) as error:
            text += f" ({error})"
    wrong.append(Problem(place, text))
    return value


def _parse_text(text: str, kind: Any) -> Any:
    if kind in _DATES:
        return kind.fromisoformat(text)
    if _is_torchs(kind, "dtype"):
        attribute = getattr(sys.modules["torch"], text.removeprefix("torch."), None)
        if not isinstance(attribute, kind):
            raise ValueError("torch has none of that name")
        return attribute
    if _is_torchs(kind, "device"):
        return kind(text)
    path = (Path if kind is os.PathLike else kind)(text)
    return path.expanduser() if isinstance(path, Path) else path


def _is_torchs(kind: Any, name: str) -> bool:
    """Return whether a class is the class `torch.<name>`, without importing torch."""
    return (kind.__module__, kind.__name__) == ("torch", name)


def describe(annotation: Any) -> str:
    """Describe in words the values that an annotation accepts, for example "a list or null"."""
    annotation = _strip_annotation(annotation)
    origin = get_origin(annotation) or annotation
    if annotation in _SCALARS:
        return _SCALARS[annotation][1]
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(choice) for choice in get_args(annotation)))
    if not isinstance(origin, type) or origin is Any:
        choices = get_args(annotation) if origin is Literal else ()
        return " or ".join(repr(_config_value(choice)) for choice in choices) or str(
            getattr(annotation, "__name__", annotation)
        )
    if issubclass(origin, enum.Enum):
        return " or ".join(repr(_config_value(choice)) for choice in origin)
    if origin in _LISTS or origin is tuple:
        return "a list"
    if origin in _MAPPINGS or is_typeddict(origin):
        return "a mapping"
    if issubclass(origin, PurePath) or origin is os.PathLike:
        return "a path"
    if _is_torchs(origin, "dtype"):
        return "a dtype of torch's, as in 'bfloat16'"
    return "a device, as in 'cuda:0'" if _is_torchs(origin, "device") else _DATES.get(origin, origin.__name__)


def brief(text: str, limit: int = 100) -> str:
    """Shorten a user's text for a message."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def shown(value: Any) -> str:
    """Format a value for a message in a config's terms, for example "null" or "the text 'abc'"."""
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
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or attrs.has(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


def _strip_annotation(annotation: Any) -> Any:
    """Return the annotation inside `Annotated` and behind aliases, or Any if no check is possible."""
    while True:
        if get_origin(annotation) in (Annotated, Required, NotRequired):
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif isinstance(annotation, dataclasses.InitVar):
            annotation = annotation.type
        elif type(get_origin(annotation) or annotation) in ALIASES:
            annotation = _resolve_alias(annotation)
        else:
            break
    try:
        hash(annotation)
    except TypeError:
        return Any
    return Any if annotation is inspect.Parameter.empty else annotation


def _resolve_alias(alias: Any) -> Any:
    """Return the type behind a type alias, with the alias's arguments inserted; Any if unknown."""
    try:
        origin = get_origin(alias) or alias
        arguments = dict(zip(origin.__type_params__, get_args(alias), strict=bool(get_args(alias))))
        value = origin.__value__
        return value[tuple(arguments[parameter] for parameter in value.__parameters__)] if arguments else value
    except Exception:  # Annotations are code, and may raise any exception.
        return Any


def _evaluate_hints(target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the parameters' annotations as types, without annotations that can't be evaluated at run time."""
    function = inspect.unwrap(cast(Any, target).__init__ if isinstance(target, type) else target)
    names = getattr(function, "__globals__", {})
    if _is_record(target):  # The globals of an `__init__` generated by attrs aren't the module's.
        names = vars(sys.modules.get(target.__module__, builtins))
    annotations = {name: parameter.annotation for name, parameter in parameters.items()}
    return _evaluate_annotations(
        {name: annotation for name, annotation in annotations.items() if annotation is not inspect.Parameter.empty},
        names,
    )


def _evaluate_annotations(annotations: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    hints = {}
    for name, annotation in annotations.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        with suppress(Exception):  # Annotations are code, and may raise any exception.
            hints[name] = get_type_hints(holder, globalns=names, include_extras=True)[name]
    return hints


# These options have a check in every executor.
_CHECKED: Mapping[str, Callable[[Any], str | None]] = {
    "cpus": find_amount_problem,
    "gpus": find_gpus_problem,
    "timeout": find_duration_problem,
    "collective_timeout": partial(find_duration_problem, positive=True),
    "spill_dir": find_spill_problem,
    "ports": find_ports_problem,
    "cut_s": partial(find_duration_problem, positive=True),
}


def options_of(executor: type) -> Arguments:
    """Return an executor's own options: the parameters of `connect` if overridden, else of the constructor."""
    from colocate.executor import Executor

    assert issubclass(executor, Executor)
    inherited = inspect.unwrap(executor.connect).__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    arguments = arguments_of(executor if inherited else executor.connect, f"executor {executor.name!r}")
    checked = {name: Annotated[arguments.hints.get(name, Any), Checked(check)] for name, check in _CHECKED.items()}
    return attrs.evolve(arguments, hints={**arguments.hints, **checked})
