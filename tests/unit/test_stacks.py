"""Stacks of threads that run on: whole ones, of frames, whatever the thread does meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import FrameType

import pytest

from colocate.worker.serving.failure import frames_of, stack_of_role_code

_OUTERMOST = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


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
        sum(number for number in numbers(50) if sorted([3, 1, 2], key=lambda one: -one))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_stacks_of_running_threads() -> None:
    """Each reaches from where the thread is to where it began; walked by Python code, some of a thousand break off."""
    over = threading.Event()
    threads = [threading.Thread(target=busy, args=[over]) for _ in range(4)]
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


def test_a_stack_as_text() -> None:
    """File, line, function and source, the outermost first, without what lies below the first call of the user's."""
    begun, over = threading.Event(), threading.Event()

    def inner() -> None:
        begun.set()
        over.wait()

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    assert begun.wait(20)
    try:
        first, second, *_ = stack_of_role_code(thread)
    finally:
        over.set()
        thread.join()
    line = outer.__code__.co_firstlineno + 1
    assert first == f'  File "{__file__}", line {line}, in outer\n    inner()\n'
    assert second.startswith(f'  File "{__file__}", line {inner.__code__.co_firstlineno + 2}, in inner\n')
    assert stack_of_role_code(thread) == []
