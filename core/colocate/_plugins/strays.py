"""Find leftovers of lost drivers on this machine: processes, shared memory, and objects of executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colocate._plugins.plugins import abouts
from colocate.executor import Running
from colocate.worker.birth import processes

_MEMORY = Path("/dev/shm")


def list_strays() -> list[Running]:
    """List all leftovers on this machine, including leftovers of executors (`About.left_here`)."""
    return [
        *_find_workers(),
        *(leftover.to_running() for leftover in processes.list_leftovers()),
        *_find_memory(),
        *_find_executor_strays(),
    ]


def _find_workers() -> Iterator[Running]:
    for process in processes.list_workers():
        if process.orphan:
            detail = f"it was started by process {process.starter}"
            yield Running("worker process", process.label, pid=process.pid, since=process.since, detail=detail)


def _find_memory() -> Iterator[Running]:
    """Yield shared-memory files with "colocate" in the name, made by roles or by vLLM's CPU ranks, never by core."""
    for entry in sorted(_MEMORY.glob("*colocate*")) if _MEMORY.is_dir() else ():
        try:
            yield Running("shared memory", str(entry), since=entry.stat().st_mtime)
        except FileNotFoundError:
            continue


def _find_executor_strays() -> Iterator[Running]:
    for _, about in abouts():
        if about.left_here is not None:
            yield from about.left_here()
