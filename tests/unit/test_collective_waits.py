"""A wait for a collective keeps its caller's timeout, and a wait for a receive isn't sliced."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable

import pytest

from colocate.features.process_groups import waits as collective_waits

SLICE = collective_waits._SLICE


class Work:
    """A stand-in for torch's handle of a collective, which the test ends."""

    def __init__(self, collective: bool = True) -> None:
        self.collective = collective
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.waits: list[datetime.timedelta | None] = []

    def get_future(self) -> None:
        if not self.collective:
            raise RuntimeError("not implemented")

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()


def as_torch_waits(work: Work, timeout: datetime.timedelta | None = None) -> bool:
    work.waits.append(timeout)
    if not work.ended.wait(None if timeout is None else timeout.total_seconds()):
        raise RuntimeError("Operation timed out!")
    if work.error is not None:
        raise work.error
    return True


class Looks:
    """Reports whether a wait is hopeless, and runs a callback at a chosen look."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.count = 0
        self.at: dict[int, Callable[[], None]] = {}

    def __call__(self) -> str | None:
        self.count += 1
        self.at.get(self.count, lambda: None)()
        return self.reason


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(collective_waits, "_hopeless", looks)
    return looks


wait = collective_waits._guard_wait(as_torch_waits)


def test_the_callers_timeout(looks: Looks) -> None:
    """A wait in slices keeps the timeout that its caller gives."""
    work, begun = Work(), time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        wait(work, 5 * SLICE)
    assert time.monotonic() - begun >= 5 * SLICE.total_seconds() - 0.001
    *slices, _ = work.waits
    assert slices == [SLICE] * looks.count  # The machine's speed decides how many.
    assert slices


def test_a_receive_waits_as_ever(looks: Looks) -> None:
    """A receive is awaited without slices: a slice that times out would end its group."""
    looks.reason = "a call failed on another rank"
    work = Work(collective=False)
    work.end()
    assert wait(work)
    assert wait(work, SLICE)
    assert work.waits == [None, SLICE]
