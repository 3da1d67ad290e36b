"""A step that fails again and again is retried up to a limit, and then raises its error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import attrs
import pytest

from colocate import ConfigError, RenewalError, RoleError
from colocate_ppo.recovery import OnStepFailure, Recovery


@attrs.define
class FakeRun:
    """A run whose last checkpoint is of this step; None for no checkpoint."""

    step: int | None = 7

    def timed(self, phase: str) -> nullcontext[None]:
        return nullcontext()

    def rewind(self) -> int | None:
        return self.step


def mistake(message: str) -> RoleError:
    """Return a call's error whose cause is a mistake in the config."""
    error = RoleError(message)
    error.__cause__ = ConfigError("there is no chat template")
    return error


def failing(times: int, error: Callable[[str], RoleError] = RoleError) -> tuple[Callable[[], str], list[int]]:
    """Return a function that raises so many times before it succeeds, and the list of its calls."""
    called: list[int] = []

    def do() -> str:
        called.append(len(called))
        if len(called) <= times:
            raise error("no")
        return "done"

    return do, called


def test_a_part_is_done_again_so_often() -> None:
    run: Any = FakeRun()
    recovery = Recovery("retry", 3)
    do, called = failing(3)
    assert recovery.run_part(run, "rollout", do) == "done"
    assert (len(called), recovery.step_metrics(), recovery.step_metrics()) == (4, {"failed_calls": 3}, {})
    do, called = failing(4)
    with pytest.raises(RoleError, match="no"):
        recovery.run_part(run, "rollout", do)
    assert len(called) == 4


@pytest.mark.parametrize(
    ("how", "limit", "error"),
    [
        ("restore", 3, RoleError),
        ("fail", 3, RoleError),
        ("retry", 0, RoleError),
        ("retry", 3, RenewalError),
        ("retry", 3, mistake),
    ],
)
def test_failed_part_is_not_retried(how: OnStepFailure, limit: int, error: Callable[[str], RoleError]) -> None:
    """A failed part isn't retried if `how`, the limit or the error forbids it."""
    run: Any = FakeRun()
    do, called = failing(1, error)
    with pytest.raises(RoleError, match="no"):
        Recovery(how, limit).run_part(run, "rollout", do)
    assert len(called) == 1


def test_checkpoint_restores_are_limited() -> None:
    run: Any = FakeRun()
    recovery, error, restored = Recovery("restore", 2), RoleError("no"), list[int]()
    for _ in range(2):  # A new checkpoint resets the count.
        for _ in range(2):
            recovery.restore_checkpoint(run, error, lambda: restored.append(1))
        with pytest.raises(RoleError):
            recovery.restore_checkpoint(run, error, lambda: restored.append(1))
        recovery.on_checkpoint()
    assert len(restored) == 4


@pytest.mark.parametrize(
    ("how", "step", "error"),
    [("retry", 7, RoleError), ("restore", None, RoleError), ("restore", 7, RenewalError), ("restore", 7, mistake)],
)
def test_no_checkpoint_is_restored(how: OnStepFailure, step: int | None, error: Callable[[str], RoleError]) -> None:
    """No checkpoint is restored if there is none, or if `how` or the error forbids it."""
    run: Any = FakeRun(step)
    with pytest.raises(RoleError) as caught:
        Recovery(how, 3).restore_checkpoint(run, error("no"), lambda: pytest.fail("it was restored"))
    notes = getattr(caught.value, "__notes__", [])
    assert bool(notes) == (step is None)


def test_a_number_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="`step_retries` must be 0 or more, not -1"):
        Recovery("retry", -1)
