"""A Dask cluster of the driver's own."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from distributed import LocalCluster, Worker

from colocate_dask.loop import LoopThread


class PrivateCluster:
    """A scheduler and Dask workers in this very process: nothing listens, and nothing is left when it ends.

    Role code doesn't run in a Dask worker but in its keeper's process, so processes of Dask's own would add nothing:
    they would need a `__main__` guard in every script, and a port that anybody on this machine could talk to.
    """

    def __init__(self, loop: LoopThread) -> None:
        """Start one, without workers."""
        self._loop = loop
        self._workers: dict[str, Worker] = {}
        self.cluster = loop.run(_start())

    def start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        """Start workers; their addresses."""
        return self._loop.run(self._start(slots, cpus, gpus))

    def stop(self, workers: Sequence[str]) -> None:
        """End workers."""
        self._loop.run(self._stop(workers))

    def close(self) -> None:
        """End everything."""
        self._loop.run(self._close())

    async def _start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        scratch = tempfile.mkdtemp(prefix="colocate-dask-")
        try:
            started = [
                Worker(
                    self.cluster.scheduler_address,
                    nthreads=max(1, math.ceil(cpus)),
                    resources={"GPU": gpus} if gpus else None,
                    memory_limit=0,
                    dashboard=False,
                    local_directory=scratch,
                )
                for _ in range(slots)
            ]
            await asyncio.gather(*started)
        finally:
            # They get no tasks, so there is nothing to spill; a folder that is gone can't be left by a killed driver.
            shutil.rmtree(scratch, ignore_errors=True)
        self._workers.update({worker.address: worker for worker in started})
        return [worker.address for worker in started]

    async def _stop(self, workers: Sequence[str]) -> None:
        ending = [worker for address in workers if (worker := self._workers.pop(address, None)) is not None]
        await asyncio.gather(*(worker.close(nanny=False) for worker in ending))

    async def _close(self) -> None:
        await self._stop(list(self._workers))
        await self.cluster.close()


async def _start() -> Any:
    options: dict[str, Any] = {
        "n_workers": 0,
        "processes": False,
        "dashboard_address": None,
        "silence_logs": logging.CRITICAL,
    }
    cluster = await LocalCluster(asynchronous=True, **options)  # type: ignore[no-untyped-call]
    cluster.shutdown_on_close = False  # at interpreter exit core closes it, after what uses it
    return cluster
