"""The thread of an event loop ends, whatever runs on it."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from distributed import LocalCluster, Worker

from colocate.errors import EngineError
from colocate.testing.forking import exit_code, fork
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_dask import loop as module
from colocate_dask import private
from colocate_dask.loop import LoopThread
from colocate_dask.private import PrivateCluster


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
    waiting = waiter(loop, lambda: endless(asyncio.Event()))
    wait_until(lambda: loop._asked, "it is waited for")
    with pytest.raises(EngineError, match="it is left behind"):
        loop.close()
    assert waiting.get(timeout=PATIENCE_S) == "it was cancelled"
    end.set()
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive()


def waiter(loop: LoopThread, what: Callable[[], Coroutine[None, None, None]]) -> queue.SimpleQueue[str]:
    """Have another thread ask for something and wait for it; what it is told."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait() -> None:
        try:
            loop.run(what())
        except TimeoutError as error:
            told.put(str(error))

    threading.Thread(target=wait, daemon=True).start()
    return told


async def forever() -> None:
    await asyncio.Event().wait()


def test_who_waits_as_it_ends() -> None:
    """Whoever waits for something is told that it won't come."""
    loop = LoopThread()
    waiting = waiter(loop, forever)
    wait_until(lambda: loop._asked, "it is waited for")
    loop.close()
    assert waiting.get(timeout=PATIENCE_S) == "it was cancelled"


def test_who_asks_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a loop that has cancelled everything, and still turns, is refused: it would never come."""
    waiting: list[queue.SimpleQueue[str]] = []
    cancel_all = module._cancel_all

    async def cancel_and_hear_more() -> None:
        await cancel_all()
        waiting.append(waiter(loop, forever))
        while waiting[0].empty() and not loop._asked:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(module, "_cancel_all", cancel_and_hear_more)
    loop = LoopThread()
    loop.close()
    assert waiting[0].get(timeout=PATIENCE_S) == "the event loop has been closed"
    with pytest.raises(TimeoutError, match="has been closed"):
        loop.run(forever())


def test_a_fork_in_which_something_is_closed_already() -> None:
    """Whatever else the child has forgotten before: what the loop watches leads nowhere there."""
    loop = LoopThread()
    (watched,) = (key.fd for key in loop._selector.get_map().values())
    child = fork()
    if child == 0:
        try:
            os.close(watched)
            while os.dup(0) != watched:  # it is the lowest number that is free
                pass
            os.close(watched)
            loop.forget()
            os._exit(0 if os.readlink(f"/proc/self/fd/{watched}") == os.devnull else 1)
        finally:
            os._exit(2)
    assert exit_code(child) == 0
    loop.close()


def test_a_private_cluster_that_is_closed_starts_nothing() -> None:
    """A worker would look for its scheduler for ever."""
    loop = LoopThread()
    cluster = PrivateCluster(loop)
    cluster.close()
    with pytest.raises(TimeoutError, match="the cluster has been closed"):
        cluster.start(1, 1.0, 0)
    loop.close()


def test_what_a_private_cluster_had_ends_with_it() -> None:
    """Whoever gives workers back while it is closed by another thread need not care, and is told nothing."""
    loop = LoopThread()
    cluster = PrivateCluster(loop)
    workers = cluster.start(1, 1.0, 0)
    cluster.close()
    loop.close()
    cluster.stop(workers)


def test_a_worker_that_starts_as_its_cluster_is_closed(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster ends once the worker has started, and takes it along: nothing is cut off half-way."""
    loop = LoopThread()
    cluster = PrivateCluster(loop)
    starting = threading.Event()
    going_on: Future[None] = Future()
    start = Worker.start

    async def slow(self: Worker) -> Any:
        starting.set()
        await asyncio.wrap_future(going_on)
        return await start(self)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Worker, "start", slow)
    with ThreadPoolExecutor(2) as threads:
        started = threads.submit(cluster.start, 1, 1.0, 0)
        assert starting.wait(PATIENCE_S)
        closed = threads.submit(cluster.close)
        wait_until(lambda: cluster._closed, "it is being closed")
        going_on.set_result(None)
        assert len(started.result(PATIENCE_S)) == 1
        closed.result(PATIENCE_S)
    loop.close()


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03])
def test_a_start_that_is_cut_off(no_leaks: None, after_s: float) -> None:
    """By Ctrl-C, say: what had been started ends."""
    loop = LoopThread()
    cluster = PrivateCluster(loop)
    with suppress(TimeoutError):
        loop.run(cluster._start(2, 1.0, 0), within_s=after_s)
    cluster.close()
    loop.close()


def test_a_worker_that_does_not_start(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, so that a close, which waits for what is just starting, ends."""

    async def never(self: Worker) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Worker, "start", never)
    monkeypatch.setattr(private, "_STARTS_WITHIN_S", 0.1)
    loop = LoopThread()
    cluster = PrivateCluster(loop)
    with pytest.raises(TimeoutError):
        cluster.start(1, 1.0, 0)
    cluster.close()
    loop.close()


def test_a_cluster_that_fails_as_it_is_closed(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is gone all the same."""
    close = LocalCluster.close

    async def fail(self: LocalCluster) -> None:
        await close(self)  # type: ignore[no-untyped-call]
        os.makedirs(self.scheduler.local_directory, exist_ok=True)
        raise ZeroDivisionError

    loop = LoopThread()
    cluster = PrivateCluster(loop)
    monkeypatch.setattr(LocalCluster, "close", fail)
    with pytest.raises(ZeroDivisionError):
        cluster.close()
    assert not os.path.exists(cluster._scratch)
    loop.close()


@pytest.mark.parametrize(("error", "reported"), [(TimeoutError("Timeout"), []), (ValueError("lost"), ["lost"])])
def test_what_nobody_looks_at_as_it_ends(
    error: Exception, reported: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A wait of Dask's whose time is up in the last turns of its loop is told to nobody; a fault is."""

    async def wait() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    loop = LoopThread()
    waits = [loop.run(wait())]
    loop.close()
    waits.pop().set_exception(error)
    gc.collect()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == reported
