"""Roles whose time is limited by signals, and roles that ask for the event loop of their thread, as a script does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from types import FrameType

import colocate
from colocate import First, Role, method
from colocate.testing.waiting import PATIENCE_S

LATE_S = 0.05


class Late(Exception):
    """It takes too long."""


def late(number: int, frame: FrameType | None) -> None:
    """Say so. A handler."""
    raise Late("too late")


def set_alarm(seconds: float = LATE_S) -> None:
    """Limit what follows."""
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def work_on() -> None:
    """Compute for as long as nobody stops it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        pass


def is_late(work: Callable[[], object] = work_on) -> bool:
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


class Limited(Role):
    """Sets alarms."""

    def __init__(self) -> None:
        self.in_time: list[bool] = []

    @method(collect=First())
    def score(self) -> bool:
        """An alarm in a method."""
        return is_late()

    @method(collect=First())
    async def score_step(self) -> bool:
        """An alarm in a step of an async method."""
        await asyncio.sleep(0)
        return is_late()

    @method(collect=First())
    def overruns(self) -> None:
        """An alarm for which the method isn't prepared."""
        set_alarm()
        work_on()

    @method(collect=First())
    def returns_slowly(self) -> Raises:
        """A signal while what a method has returned is packed."""
        signal.signal(signal.SIGALRM, late)
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
    def seen(self) -> list[bool]:
        """What has been noted."""
        return self.in_time


class Looped(Role):
    """What is made for a loop in a constructor, and used in async methods."""

    def __init__(self) -> None:
        loop = asyncio.get_event_loop()
        self.done = loop.create_future()
        self.task = loop.create_task(self.finish())

    async def finish(self) -> None:
        """Tell those who wait."""
        await asyncio.sleep(0)
        self.done.set_result("done")

    @method(collect=First())
    async def waits(self) -> str:
        """In an async method."""
        return str(await self.done)

    @method(collect=First())
    def asks(self) -> int:
        """In one that isn't."""
        return asyncio.get_event_loop().run_until_complete(_answer())

    @method(collect=First())
    def runs(self) -> int:
        """With a loop of its own, which leaves the thread without one."""
        return asyncio.run(_answer())

    @method(collect=First())
    def closes(self) -> None:
        """As scripts do at their end."""
        asyncio.get_event_loop().close()

    @method(collect=First())
    async def awaits(self) -> int:
        """Anything."""
        return await _answer()


async def _answer() -> int:
    await asyncio.sleep(0)
    return 42


async def answer(ctx: colocate.Context) -> int:
    """A function of a group."""
    return await _answer()
