"""Stacks of threads that run on: whole ones, of frames, whatever the thread does meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from types import FrameType

from colocate.worker.serving.failure import frames_of

_OUTERMOST = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]


async def numbers_later(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number


async def add(depth: int) -> int:
    if depth:
        return await add(depth - 1)
    return sum([number async for number in numbers_later(3)])


def busy(over: threading.Event) -> None:
    """Enters and leaves frames of all kinds, as fast as it can."""
    while not over.is_set():
        asyncio.run(add(5))
        sum(number for number in range(50) if sorted([3, 1, 2], key=lambda one: -one))


def test_stacks_of_running_threads() -> None:
    """Each reaches from where the thread is to where it began; walked by Python code, some of a thousand break off."""
    over = threading.Event()
    threads = [threading.Thread(target=busy, args=[over]) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for thread in threads:
                frames = frames_of(thread)
                assert {type(frame) for frame in frames} == {FrameType}
                assert frames[-1].f_code is _OUTERMOST
                del frames
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
