"""The loop of a lane: whether role code has left something there, and how it is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from colocate.testing.waiting import wait_until
from colocate.worker.serving.tasks import Tasks


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    asyncio.set_event_loop(asyncio.new_event_loop())
    found = Tasks(lambda: False, 0)
    yield found
    found.close()
    asyncio.set_event_loop(None)


async def _nothing() -> None: ...


def _forever(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    return loop.create_task(asyncio.sleep(3600)).cancel


def _task_without_the_factory(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    return asyncio.Task(asyncio.sleep(3600), loop=loop).cancel


def _timer(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    return loop.call_later(3600, print).cancel


def _server(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    return loop.run_until_complete(asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)).close


@pytest.mark.parametrize("leaves", [_forever, _task_without_the_factory, _timer, _server])
def test_what_goes_on_between_calls(tasks: Tasks, leaves: Callable[[Any], Callable[[], object]]) -> None:
    """Nothing does by itself, nor when it is over: then the lane waits as it does without a loop."""
    loop = asyncio.get_event_loop()
    assert not tasks.go_on()
    end = leaves(loop)
    assert tasks.go_on()
    loop.run_until_complete(_nothing())
    assert tasks.go_on()
    end()
    for _ in range(2):
        loop.run_until_complete(_nothing())
    assert not tasks.go_on()


def test_it_is_waited_for_without_looking_again_and_again(tasks: Tasks) -> None:
    loop: Any = asyncio.get_event_loop()
    left = loop.create_task(asyncio.Event().wait())
    timeouts: list[float | None] = []
    select = loop._selector.select

    def noted(timeout: float | None = None) -> Any:
        timeouts.append(timeout)
        return select(timeout)

    loop._selector.select = noted
    waits = threading.Thread(target=tasks.wait)
    waits.start()
    wait_until(lambda: None in timeouts, "it waits until something comes")
    count = len(timeouts)
    assert timeouts[-1] is None
    tasks.wake()
    waits.join()
    assert timeouts[count - 1] is None
    assert not left.done()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("steps", range(6))
def test_the_end_of_a_call_ends_the_wait(tasks: Tasks, steps: int) -> None:
    """However soon it comes, also before the loop has come to wait: another call may begin then."""

    async def call() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    tasks.begin(1, call())
    if len(tasks):
        tasks.wait()
    assert not len(tasks)
