"""`Replay` and `Compare`: the user's options for a role that is replayed from or compared with a recording."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any, Literal

import attrs

from colocate._system.numbers import find_amount_problem, find_step_problem
from colocate.errors import ConfigError


def _absolute(folder: str | PathLike[str]) -> str:
    return os.path.abspath(folder)


@attrs.frozen
class Replay:
    """A recording that answers the calls of a role in place of the role: `colocate.role(...).on(replay=...)`.

    A call whose method, order or arguments differ from the recording raises a `ReplayError`, which names the first
    difference. The role isn't constructed, so it needs no memory; `sync_weights`, sleep, pause and checkpoint are
    accepted and do nothing.

    Attributes:
        folder: The folder of a run, or of a recording.
        step: The first step to replay, as counted by `run.log`; None for the first one.
        loose: Whether differences are warnings only.
    """

    folder: str = attrs.field(converter=_absolute)
    step: int | None = None
    loose: bool = False

    def __attrs_post_init__(self) -> None:
        if self.step is not None and (problem := find_step_problem(self.step)) is not None:
            raise ConfigError(f"Replay(step) {problem}")


@attrs.frozen
class Compare:
    """A recording to compare with a role's results: `colocate.role(...).on(compare=...)`.

    The first difference is reported; `colocate.comparison(view)` has a table by method. The recording may be of another
    executor, version or machine. With another number of ranks, the values that callers get are compared.

    Attributes:
        folder: The folder of a run, or of a recording.
        tolerance: The allowed distance of numbers from recorded ones, absolute or relative.
        step: The first step to compare, as counted by `run.log`; None for the first one.
    """

    folder: str = attrs.field(converter=_absolute)
    tolerance: float = 0.0
    step: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, value, problem_of in (
            ("tolerance", self.tolerance, find_amount_problem),
            ("step", self.step, find_step_problem),
        ):
            if value is not None and (problem := problem_of(value)) is not None:
                raise ConfigError(f"Compare({name}) {problem}")


def check_option(what: Literal["replay", "compare"], value: Any) -> Replay | Compare:
    """Convert an argument of `role(...).on()` to a `Replay` or `Compare`."""
    kind: type[Replay | Compare] = Replay if what == "replay" else Compare
    if isinstance(value, kind):
        return value
    if not isinstance(value, str | PathLike):
        raise ConfigError(f"on({what}={value!r}): it is a folder, or a colocate.{kind.__name__}")
    return kind(value)
