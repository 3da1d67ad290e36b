"""Roles whose time is limited by signals, that ask for the event loop, and that start processes, end them, and fork."""

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
    """An error of taking too long."""


def raise_late(number: int, frame: FrameType | None) -> None:
    """Say so. A handler."""
    raise Late("too late")


def set_alarm(seconds: float = LATE_S) -> None:
    """Limit what follows."""
    signal.signal(signal.SIGALRM, raise_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def work_forever() -> None:
    """Compute for as long as nobody stops it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        pass


def is_late(work: Callable[[], object] = work_forever) -> bool:
    """Whether some work is stopped by an alarm, as timeout decorators have it."""
    set_alarm()
    try:
        work()
    except Late:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


class Raises:
    """A value during whose packing a signal comes, and a number which is asked for its value then."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        signal.raise_signal(signal.SIGALRM)
        return int, (1,)


def _wait_for_end(connection: Connection) -> None:
    os._exit(connection.recv())


class LimitedRole(Role):
    """Sets alarms."""

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
        """A signal while what a method has returned is packed."""
        signal.signal(signal.SIGALRM, raise_late)
        return Raises()

    @method(collect=First())
    async def awaits(self) -> str:
        """An alarm while an async method awaits something."""
        set_alarm()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.in_time.append(False)
            raise
        return "in time"

    @method(collect=First())
    def forked(self, sent: Sequence[signal.Signals]) -> int | None:
        """The exit code of a fork to which signals come, a DataLoader's worker say; 3 if it goes on."""
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
        """Return what comes to a handler of its own."""
        heard: list[int] = []
        before = signal.signal(number, lambda number, frame: heard.append(number))
        signal.raise_signal(number)
        signal.signal(number, before)
        return heard

    @method(collect=First())
    def seen(self) -> list[bool]:
        return self.in_time
