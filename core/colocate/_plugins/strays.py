"""What is left of colocate on this machine although its driver is gone: processes, shared memory, executors' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colocate._plugins.plugins import find_executor, plugins
from colocate.errors import ColocateError
from colocate.executor import Running
from colocate.worker import processes

_MEMORY = Path("/dev/shm")


def of_this_machine() -> list[Running]:
    """All of it, that of every installed executor included."""
    return [*_workers(), *(left.running() for left in processes.left_by()), *_memory(), *_of_executors()]


def _workers() -> Iterator[Running]:
    for found in processes.of_this_machine():
        if found.orphan:
            detail = f"it was started by process {found.starter}"
            yield Running("worker process", found.label, pid=found.pid, since=found.since, detail=detail)


def _memory() -> Iterator[Running]:
    """Named shared memory. Nothing of colocate's makes any: what has its name was left by a role, or a mistake."""
    for entry in sorted(_MEMORY.glob("*colocate*")) if _MEMORY.is_dir() else ():
        try:
            yield Running("shared memory", str(entry), since=entry.stat().st_mtime)
        except FileNotFoundError:
            continue


def _of_executors() -> Iterator[Running]:
    for plugin in plugins():
        if plugin.kind != "executor":
            continue
        try:
            found = find_executor(plugin.name)
        except ColocateError:  # one that can't be imported here has started nothing here
            continue
        yield from found.left_here()
