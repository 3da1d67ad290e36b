"""The thread of an event loop ends, whatever runs on it."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from distributed import Worker
from tests.forking import exit_code, fork

from colocate.errors import ClusterError
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_dask import loop as module
from colocate_dask.loop import LoopThread
from colocate_dask.private import PrivateCluster


def test_a_task_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a loop with a task that ignores cancellation raises, and frees the thread that waits for the task."""
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
    wait_until(lambda: loop._futures, "it is waited for")
    with pytest.raises(ClusterError, match="it is left behind"):
        loop.close()
    assert waiting.get(timeout=PATIENCE_S) == "it was cancelled"
    end.set()
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive()


def waiter(loop: LoopThread, what: Callable[[], Coroutine[None, None, None]]) -> queue.SimpleQueue[str]:
    """Run a coroutine from another thread; return the queue for its error."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait() -> None:
        try:
            loop.run_coroutine(what())
        except TimeoutError as error:
            told.put(str(error))

    threading.Thread(target=wait, daemon=True).start()
    return told


def test_fork_with_closed_descriptor_gets_dev_null() -> None:
    """In a forked child, the loop's descriptor leads to /dev/null, even if it was closed before."""
    loop = LoopThread()
    (watched,) = (key.fd for key in loop._selector.get_map().values())
    child = fork()
    if child == 0:
        try:
            os.close(watched)
            while os.dup(0) != watched:  # dup() takes the lowest free number
                pass
            os.close(watched)
            loop.close_after_fork()
            os._exit(0 if os.readlink(f"/proc/self/fd/{watched}") == os.devnull else 1)
        finally:
            os._exit(2)
    assert exit_code(child) == 0
    loop.close()


def test_cluster_close_waits_for_starting_worker(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a cluster waits for a worker that is starting, and then ends it."""
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
        started = threads.submit(cluster.start_workers, 1, 1.0, 0)
        assert starting.wait(PATIENCE_S)
        closed = threads.submit(cluster.close)
        wait_until(lambda: cluster._closed, "it is being closed")
        going_on.set_result(None)
        assert len(started.result(PATIENCE_S)) == 1
        closed.result(PATIENCE_S)
    loop.close()
