"""`Replay` and `Compare`: what users say of a recording that a role is to be replayed from, or compared with."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any, Literal

import attrs

from colocate._system.numbers import amount_problem, step_problem
from colocate.errors import ConfigError


def _absolute(folder: str | PathLike[str]) -> str:
    return os.path.abspath(folder)


@attrs.frozen
class Replay:
    """A recording that answers the calls of a role, which isn't constructed: `colocate.role(...).on(replay=...)`.

    A call whose method, order or arguments differ from what was recorded is an error, `ReplayError`, that names the
    first difference. What the role would hold, start or get is nothing: its memory is free; `sync_weights`, sleep,
    pause and checkpoint are accepted and do nothing.

    Attributes:
        folder: That of a run, or of a recording.
        step: The step, as `run.log` has counted them, with which to begin; None for the first one.
        loose: Whether differences are only told.
    """

    folder: str = attrs.field(converter=_absolute)
    step: int | None = None
    loose: bool = False

    def __attrs_post_init__(self) -> None:
        if self.step is not None and (problem := step_problem(self.step)) is not None:
            raise ConfigError(f"Replay(step) {problem}")


@attrs.frozen
class Compare:
    """A recording with which is compared what a role gives: `colocate.role(...).on(compare=...)`.

    The first difference is told; `colocate.comparison(view)` has a table by method. It may be of another executor,
    version or machine. With another number of ranks, what the caller of each call gets is compared.

    Attributes:
        folder: That of a run, or of a recording.
        tolerance: How far numbers may be from those that were recorded, absolutely and relatively.
        step: As of `Replay`.
    """

    folder: str = attrs.field(converter=_absolute)
    tolerance: float = 0.0
    step: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, value, problem_of in ("tolerance", self.tolerance, amount_problem), ("step", self.step, step_problem):
            if value is not None and (problem := problem_of(value)) is not None:
                raise ConfigError(f"Compare({name}) {problem}")


def given(what: Literal["replay", "compare"], value: Any) -> Replay | Compare:
    """Return what was given to `role(...).on()`."""
    kind: type[Replay | Compare] = Replay if what == "replay" else Compare
    if isinstance(value, kind):
        return value
    if not isinstance(value, str | PathLike):
        raise ConfigError(f"on({what}={value!r}): it is a folder, or a colocate.{kind.__name__}")
    return kind(value)
