"""The thread of an event loop ends, whatever runs on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest

from colocate.errors import EngineError
from colocate.testing.waiting import PATIENCE_S
from colocate_dask import loop as module
from colocate_dask.loop import LoopThread


def running(loop: LoopThread, task: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> asyncio.Event:
    """Have a task run; the event that it is given."""

    async def begin() -> asyncio.Event:
        never = asyncio.Event()
        tasks.append(asyncio.create_task(task(never)))
        await asyncio.sleep(0)
        return never

    tasks: list[asyncio.Task[None]] = []
    return loop.run(begin())


def test_a_task_that_waits_for_another_one_when_it_is_cancelled() -> None:
    """As Dask's worker does in its closing: it is cancelled again."""

    async def stubborn(never: asyncio.Event) -> None:
        try:
            await never.wait()
        finally:
            await never.wait()

    loop = LoopThread()
    running(loop, stubborn)
    loop.close()
    assert not loop._thread.is_alive()


def test_a_task_that_fails_when_it_is_cancelled() -> None:
    """That is nobody's concern any more."""

    async def failing(never: asyncio.Event) -> None:
        try:
            await never.wait()
        finally:
            raise ValueError("too late")

    loop = LoopThread()
    running(loop, failing)
    loop.close()
    assert not loop._thread.is_alive()


def test_a_task_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends all the same, and says so."""
    monkeypatch.setattr(module, "_CANCELLED_WITHIN_S", 0.01)
    monkeypatch.setattr(module, "_ENDS_WITHIN_S", 0.5)
    end = threading.Event()

    async def endless(never: asyncio.Event) -> None:
        while not end.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    loop = LoopThread()
    running(loop, endless)
    with pytest.raises(EngineError, match="it is left behind"):
        loop.close()
    end.set()
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive()
