"""The options of an executor, and what they may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import attrs

from colocate._signatures.annotations import Arguments, Checked, arguments_of
from colocate._system.numbers import amount_problem, duration_problem, gpus_problem, ports_problem
from colocate._system.room import spill_problem

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
    """The options of an executor's own: the parameters of its `connect`, or of its constructor if it has none."""
    from colocate.executor import Executor

    assert issubclass(executor, Executor)
    inherited = inspect.unwrap(executor.connect).__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    found = arguments_of(executor if inherited else executor.connect, f"executor {executor.name!r}")
    checked = {name: Annotated[found.hints.get(name, Any), Checked(check)] for name, check in _CHECKED.items()}
    return attrs.evolve(found, hints={**found.hints, **checked})
