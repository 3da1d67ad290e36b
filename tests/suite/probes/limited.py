"""Roles that limit their time by signals, and that fork."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType

from colocate import First, Role, method
from colocate.testing.waiting import PATIENCE_S

LATE_S = 0.05


class Late(Exception):
    """The error of a call that takes too long."""


def raise_late(number: int, frame: FrameType | None) -> None:
    """Raise Late: a signal handler."""
    raise Late("too late")


def set_alarm(seconds: float = LATE_S) -> None:
    """Limit the time of the code that follows."""
    signal.signal(signal.SIGALRM, raise_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def work_forever() -> None:
    """Compute until an exception, or for a long time."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        pass


def is_late(work: Callable[[], object] = work_forever) -> bool:
    """Return whether an alarm stops the work, as in timeout decorators."""
    set_alarm()
    try:
        work()
    except Late:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


class Raises:
    """A value that raises SIGALRM while it is pickled."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        signal.raise_signal(signal.SIGALRM)
        return int, (1,)


def _wait_for_end(connection: Connection) -> None:
    os._exit(connection.recv())


class LimitedRole(Role):
    """A role that sets alarms."""

    def __init__(self) -> None:
        self.in_time: list[bool] = []

    @method(collect=First())
    def score(self) -> bool:
        return is_late()

    @method(collect=First())
    async def score_step(self) -> bool:
        await asyncio.sleep(0)
        return is_late()

    @method(collect=First())
    def overruns(self) -> None:
        set_alarm()
        work_forever()

    @method(collect=First())
    def returns_slowly(self) -> Raises:
        """Return a value whose pickling raises a signal."""
        signal.signal(signal.SIGALRM, raise_late)
        return Raises()

    @method(collect=First())
    async def awaits(self) -> str:
        """Await a sleep that outlasts an alarm."""
        set_alarm()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.in_time.append(False)
            raise
        return "in time"

    @method(collect=First())
    def forked(self, sent: Sequence[signal.Signals]) -> int | None:
        """Return the exit code of a fork that gets signals; 3 if the fork survives."""
        context = multiprocessing.get_context("fork")
        local_end, remote_end = context.Pipe()
        process = context.Process(target=_wait_for_end, args=(remote_end,))
        process.start()
        for number in sent:
            os.kill(process.pid or 0, number)
        local_end.send(3)
        process.join()
        return process.exitcode

    @method(collect=First())
    def hears(self, number: signal.Signals) -> list[int]:
        """Return the signals that a handler of the role gets."""
        heard: list[int] = []
        before = signal.signal(number, lambda number, frame: heard.append(number))
        signal.raise_signal(number)
        signal.signal(number, before)
        return heard

    @method(collect=First())
    def seen(self) -> list[bool]:
        return self.in_time
