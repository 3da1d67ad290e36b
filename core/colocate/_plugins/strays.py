"""Find leftovers of lost drivers on this machine: processes, shared memory, and objects of executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colocate._plugins.plugins import abouts
from colocate.executor import Running
from colocate.worker.birth import processes

_MEMORY = Path("/dev/shm")


def of_this_machine() -> list[Running]:
    """List all leftovers on this machine, including leftovers of executors (`About.left_here`)."""
    return [*_workers(), *(leftover.running() for leftover in processes.left_by()), *_memory(), *_of_executors()]


def _workers() -> Iterator[Running]:
    for process in processes.of_this_machine():
        if process.orphan:
            detail = f"it was started by process {process.starter}"
            yield Running("worker process", process.label, pid=process.pid, since=process.since, detail=detail)


def _memory() -> Iterator[Running]:
    """Yield shared memory with "colocate" in the name, made by roles or by vLLM's CPU ranks, but never by core."""
    for entry in sorted(_MEMORY.glob("*colocate*")) if _MEMORY.is_dir() else ():
        try:
            yield Running("shared memory", str(entry), since=entry.stat().st_mtime)
        except FileNotFoundError:
            continue


def _of_executors() -> Iterator[Running]:
    for _, about in abouts():
        if about.left_here is not None:
            yield from about.left_here()
