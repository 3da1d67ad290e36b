"""A private Dask cluster, which runs inside the driver's process."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from distributed import LocalCluster, Security, Worker

from colocate_dask.loop import NAME, LoopThread
from colocate_dask.scratch import PREFIX

_LOOPBACK = "127.0.0.1:0"
_STARTS_WITHIN_S = 30.0  # A worker starts within milliseconds, because worker and scheduler run in this process.


@attrs.frozen(eq=False)
class _PrivateWorker:
    worker: Worker
    scratch: str


class PrivateCluster:
    """A Dask scheduler and Dask workers inside the driver's process.

    No part listens on a port, and no part outlives the driver's process.

    Role code runs in a keeper's process, not in a Dask worker, so Dask processes would add nothing: they would need
    a `__main__` guard in every script, and a port open to all users of this machine.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._workers: dict[str, _PrivateWorker] = {}
        self._changing = asyncio.Lock()  # This lock makes a start or stop of workers finish before the cluster closes.
        self._closed = False
        self._quiet = _silence_logs()
        try:
            self.cluster, self._scratch = loop.run_coroutine(_start_scheduler())
        except BaseException:
            self._quiet()
            raise

    def start_workers(self, slots: int, cpus: float, gpus: int) -> list[str]:
        """Start Dask workers and return their addresses.

        Raises:
            TimeoutError: The cluster is being closed, or the workers didn't start in time.
        """
        return self._loop.run_coroutine(self._start_workers(slots, cpus, gpus))

    def stop_workers(self, workers: Sequence[str]) -> None:
        """Stop Dask workers. A cluster that is closing stops all of its workers without this call."""
        try:
            self._loop.run_coroutine(self._stop_workers(workers))
        except TimeoutError:
            if not self._closed:
                raise

    def close(self) -> None:
        """Close the Dask workers and the scheduler."""
        try:
            self._loop.run_coroutine(self._close_cluster())
        finally:
            self._quiet()

    async def _start_workers(self, slots: int, cpus: float, gpus: int) -> list[str]:
        async with self._changing:
            if self._closed:  # A new worker would search for the closed scheduler for ever.
                raise TimeoutError("the cluster has been closed")
            made_workers = await self._make_workers(slots, cpus, gpus)
            self._workers.update({entry.worker.address: entry for entry in made_workers})
        return [entry.worker.address for entry in made_workers]

    async def _make_workers(self, slots: int, cpus: float, gpus: int) -> list[_PrivateWorker]:
        scratch = tempfile.mkdtemp(prefix=PREFIX)
        started = [
            Worker(
                self.cluster.scheduler_address,
                nthreads=max(1, math.ceil(cpus)),
                resources={"GPU": gpus} if gpus else None,
                memory_limit=0,
                dashboard=False,
                dashboard_address=_LOOPBACK,
                local_directory=scratch,
            )
            for _ in range(slots)
        ]
        entries = [_PrivateWorker(worker, scratch) for worker in started]
        try:
            # This timeout also bounds `close`, which waits until the start has ended.
            async with asyncio.timeout(_STARTS_WITHIN_S):
                await asyncio.gather(*started)
            for worker in started:
                _close_status_server(worker)
        except BaseException:
            await _end_workers(entries)
            raise
        finally:
            _remove_folder(scratch)
        return entries

    async def _stop_workers(self, workers: Sequence[str]) -> None:
        async with self._changing:
            await _end_workers(
                [entry for address in workers if (entry := self._workers.pop(address, None)) is not None]
            )

    async def _close_cluster(self) -> None:
        self._closed = True
        async with self._changing:
            try:
                await _end_workers(list(self._workers.values()))
                self._workers.clear()
                _restore_folder(self.cluster.scheduler)
                await self.cluster.close()
            finally:
                _remove_folder(self._scratch)


def _silence_logs() -> Callable[[], None]:
    """Mute Dask's non-critical output and false log lines, and return a function that ends the muting.

    The filter is added to the first handler only, which Dask's import adds. `silence_logs` would set the level of all
    stream and file handlers of root and "distributed", also of handlers that a user or pytest has added.
    """
    handlers = [
        candidate
        for candidate in logging.getLogger("distributed").handlers[:1]
        if type(candidate) is logging.StreamHandler
    ]

    def critical(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    def true(record: logging.LogRecord) -> bool:
        # Dask logs the address of a status page that `_close_status_server` has closed.
        return record.threadName != NAME or "dashboard at:" not in record.getMessage()

    loggers = [logging.getLogger(f"distributed.{name}") for name in ("scheduler", "worker")]
    for handler in handlers:
        handler.addFilter(critical)
    for logger in loggers:
        logger.addFilter(true)

    def undo() -> None:
        for handler in handlers:
            handler.removeFilter(critical)
        for logger in loggers:
            logger.removeFilter(true)

    return undo


async def _end_workers(doomed: Sequence[_PrivateWorker]) -> None:
    for entry in doomed:
        _restore_folder(entry.worker)
    try:
        await asyncio.gather(*(entry.worker.close(nanny=False) for entry in doomed))
    finally:
        for scratch in {entry.scratch for entry in doomed}:
            _remove_folder(scratch)


async def _start_scheduler() -> tuple[Any, str]:
    """Start the cluster, and return the cluster with the path of the scheduler's scratch folder."""
    scratch = tempfile.mkdtemp(prefix=PREFIX)
    options: dict[str, Any] = {
        "n_workers": 0,
        "processes": False,
        # Encryption isn't needed, because all traffic stays in this process.
        "security": Security(require_encryption=False),  # type: ignore[no-untyped-call]
        "dashboard_address": _LOOPBACK,
        "scheduler_kwargs": {"dashboard": False, "local_directory": scratch},
        "silence_logs": False,  # True would also change the log handlers of other code.
    }
    try:
        cluster = await LocalCluster(asynchronous=True, **options)  # type: ignore[no-untyped-call]
    finally:
        _remove_folder(scratch)
    # At interpreter exit, core first closes the users of the cluster, then the cluster.
    cluster.shutdown_on_close = False
    _close_status_server(cluster.scheduler)
    return cluster, scratch


def _remove_folder(scratch: str) -> None:
    """Remove a scratch folder, and the entries that Dask has added to `sys.path` below the folder.

    Called right after the start, so that a killed driver leaves no folder behind. Dask writes to the folder only when
    tasks need it, and there are none.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(scratch)]


def _restore_folder(node: Any) -> None:
    """Recreate the scratch folder of a closing worker or scheduler, because Dask complains about a missing folder."""
    os.makedirs(node.local_directory, exist_ok=True)


def _close_status_server(node: Any) -> None:
    """Close the HTTP server of status pages, which Dask opens even without a dashboard."""
    node.http_server.stop()
