"""The arguments of a `with:` entry against the signature that they are for."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import attrs

from colocate._signatures.annotations import Checked, Problem, problems
from colocate._system.nearest import nearest
from colocate._system.numbers import amount_problem, duration_problem, gpus_problem
from colocate._system.room import spill_problem

# Of every executor that has options of these names.
_CHECKED: Mapping[str, Callable[[Any], str | None]] = {
    "cpus": amount_problem,
    "gpus": gpus_problem,
    "timeout": duration_problem,
    "collective_timeout": partial(duration_problem, positive=True),
    "spill_dir": spill_problem,
}


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
        """What doesn't fit: unknown, missing, of a wrong simple type."""
        meant = set()  # by names that are misspelt: they aren't missing besides
        for name, value in given.items():
            if name in self.parameters:
                yield from problems(value, self.hints.get(name, Any), (name,))
            elif not self.open:
                unknown = self._unknown(name)
                meant.add(unknown.nearest)
                yield unknown
        for name, parameter in self.parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in given and name not in meant:
                hint = self.hints.get(name)
                kind = f" ({hint.__name__})" if isinstance(hint, type) else ""
                yield Problem((), f"{self.owner} needs {name!r}{kind}")

    def _unknown(self, name: str) -> Problem:
        near = nearest(name, self.parameters)
        takes = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes none"
        text = f"{self.owner} has no parameter {name!r}"
        return Problem((name,), text if near else f"{text}; {takes}", near)


def arguments_of(target: Callable[..., Any], owner: str, skip: int = 0) -> Arguments:
    """What a class or function takes by name.

    Args:
        target: The class or function.
        owner: What messages call it.
        skip: How many leading parameters are given by others.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):  # some written in C have no signature: nothing is known
        return Arguments(owner, {}, {}, open=True)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in by_name}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return Arguments(owner, named, _hints(target, named), takes_any)


def options_of(executor: type) -> Arguments:
    """The options of an executor's own: the parameters of its `connect`, or of its constructor if it has none."""
    from colocate.executor import Executor

    assert issubclass(executor, Executor)
    inherited = inspect.unwrap(executor.connect).__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    found = arguments_of(executor if inherited else executor.connect, f"executor {executor.name!r}")
    checked = {name: Annotated[found.hints.get(name, Any), Checked(check)] for name, check in _CHECKED.items()}
    return attrs.evolve(found, hints={**found.hints, **checked})


def _hints(target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The annotations as types; one that can't be evaluated (imported for type checkers only) is left out."""
    function = inspect.unwrap(typing.cast(Any, target).__init__ if isinstance(target, type) else target)
    names = getattr(function, "__globals__", {})
    found = {}
    for name, parameter in parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            continue
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            found[name] = typing.get_type_hints(holder, globalns=names)[name]
        except Exception:  # annotations are code: they may raise anything
            continue
    return found
