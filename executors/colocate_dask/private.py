"""A Dask cluster of the driver's own."""

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
_STARTS_WITHIN_S = 30.0  # a worker needs milliseconds: it is in this process, as is its scheduler


@attrs.frozen(eq=False)
class _Made:
    """A worker, and the folder that Dask wants for it."""

    worker: Worker
    scratch: str


class PrivateCluster:
    """A scheduler and Dask workers in this very process: nothing listens, and nothing is left when it ends.

    Role code doesn't run in a Dask worker but in its keeper's process, so processes of Dask's own would add nothing:
    they would need a `__main__` guard in every script, and a port that anybody on this machine could talk to.
    """

    def __init__(self, loop: LoopThread) -> None:
        """Start one, without workers."""
        self._loop = loop
        self._workers: dict[str, _Made] = {}
        self._changing = asyncio.Lock()  # what starts or ends has done so before the cluster ends under it
        self._closed = False
        self._quiet = _quieten()
        try:
            self.cluster, self._scratch = loop.run(_start())
        except BaseException:
            self._quiet()
            raise

    def start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        """Start workers; their addresses.

        Raises:
            TimeoutError: The cluster is being closed, or they didn't start.
        """
        return self._loop.run(self._start(slots, cpus, gpus))

    def stop(self, workers: Sequence[str]) -> None:
        """End workers; those of a cluster that is closed, or just being closed, end with that."""
        try:
            self._loop.run(self._stop(workers))
        except TimeoutError:
            if not self._closed:
                raise

    def close(self) -> None:
        """End everything."""
        try:
            self._loop.run(self._close())
        finally:
            self._quiet()

    async def _start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        async with self._changing:
            if self._closed:  # a worker would look for its scheduler for ever
                raise TimeoutError("the cluster has been closed")
            made = await self._make(slots, cpus, gpus)
            self._workers.update({each.worker.address: each for each in made})
        return [each.worker.address for each in made]

    async def _make(self, slots: int, cpus: float, gpus: int) -> list[_Made]:
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
        made = [_Made(worker, scratch) for worker in started]
        try:
            async with asyncio.timeout(_STARTS_WITHIN_S):  # also for a close, which waits until this is over
                await asyncio.gather(*started)
            for worker in started:
                _stop_listening(worker)
        except BaseException:
            await _end(made)
            raise
        finally:
            _forget(scratch)
        return made

    async def _stop(self, workers: Sequence[str]) -> None:
        async with self._changing:
            await _end([each for address in workers if (each := self._workers.pop(address, None)) is not None])

    async def _close(self) -> None:
        self._closed = True
        async with self._changing:
            try:
                await _end(list(self._workers.values()))
                self._workers.clear()
                _give_folder(self.cluster.scheduler)
                await self.cluster.close()
            finally:
                _forget(self._scratch)


def _quieten() -> Callable[[], None]:
    """Keep what Dask prints to what is critical, and what it logs to what is true; what undoes that.

    It prints by the handler that Dask adds when it is imported, the first: `silence_logs` would set the
    level of every stream or file handler there, also of those that a user has added to root and to "distributed", as
    pytest does.
    """
    handlers = [each for each in logging.getLogger("distributed").handlers[:1] if type(each) is logging.StreamHandler]

    def critical(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    def true(record: logging.LogRecord) -> bool:
        # Dask tells an address of status pages, beyond loopback even. See `_stop_listening`.
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


async def _end(doomed: Sequence[_Made]) -> None:
    for each in doomed:
        _give_folder(each.worker)
    try:
        await asyncio.gather(*(each.worker.close(nanny=False) for each in doomed))
    finally:
        for scratch in {each.scratch for each in doomed}:
            _forget(scratch)


async def _start() -> tuple[Any, str]:
    """The cluster, and the folder that Dask wants for its scheduler."""
    scratch = tempfile.mkdtemp(prefix=PREFIX)
    options: dict[str, Any] = {
        "n_workers": 0,
        "processes": False,
        "security": Security(require_encryption=False),  # type: ignore[no-untyped-call]  # it is all within this process
        "dashboard_address": _LOOPBACK,
        "scheduler_kwargs": {"dashboard": False, "local_directory": scratch},
        "silence_logs": False,  # it would be for everybody's handlers: see `_quieten`
    }
    try:
        cluster = await LocalCluster(asynchronous=True, **options)  # type: ignore[no-untyped-call]
    finally:
        _forget(scratch)
    cluster.shutdown_on_close = False  # at interpreter exit core closes it, after what uses it
    _stop_listening(cluster.scheduler)
    return cluster, scratch


def _forget(scratch: str) -> None:
    """Remove a folder that Dask wants, at once: what gets no tasks has nothing to spill, and a killed driver leaves it.

    Dask has put it on the path of imports too, which is the driver's here.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(scratch)]


def _give_folder(node: Any) -> None:
    """Give a worker or scheduler that ends its folder back, for it to remove: it complains where there is none."""
    os.makedirs(node.local_directory, exist_ok=True)


def _stop_listening(node: Any) -> None:
    """Close the server of status pages, which Dask opens even without a dashboard."""
    node.http_server.stop()
