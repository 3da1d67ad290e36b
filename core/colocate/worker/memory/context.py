"""A worker as the parts of it that look after its memory know it; and what its process has in all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from colocate._protocol.message import Message
from colocate.executor import Boot
from colocate.worker.device import Device
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Lane
from colocate.worker.residents.store import Store
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.torch_groups.settings import Setting


class ProcessMemory:
    """What the worker's process has that is its own, in bytes.

    Attributes:
        empty: What it had before the first role was constructed.
    """

    empty = 0

    def begin(self) -> None:
        """The worker is empty now."""
        self.empty = private_bytes()

    def look(self, pinned: int) -> dict[str, int]:
        """Return what there is now, as a ledger calls it. `pinned`: for a device's memory that sleeps."""
        with open("/proc/self/smaps_rollup") as file:  # what this process was forked from has it, too, and other forks
            shared = next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))
        return {"private": private_bytes(), "empty": self.empty, "pinned": pinned, "shared": shared}


def private_bytes(pid: int | None = None) -> int:
    """Return the memory of this process, or another, that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    try:
        with open(f"/proc/{pid or 'self'}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:  # it is gone
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


class Worker(Protocol):
    """What they need of a worker; see `WorkerContext`."""

    boot: Boot
    store: Store
    roles: dict[Any, RoleInstance]
    lane: Lane
    spill_dir: str | None
    in_process: bool
    process: ProcessMemory | None
    device: Device
    setting: Setting
    parts: Mapping[str, OfWorker]

    def ask(self, question: Message) -> Any:
        """Ask the driver."""
        ...

    def say(self, message: Message) -> None:
        """Tell the driver."""
        ...


def named(worker_context: Worker) -> dict[str, RoleInstance]:
    """Return the roles of a worker by name, without what functions run in; on any thread."""
    return {role.name: role for role in list(worker_context.roles.values()) if role.name is not None}


def beside(worker_context: Worker, name: str | None = None) -> list[object]:
    """Return the objects that aren't looked into with those of one role: the other roles', and what it sets apart."""
    found = [role.instance for each, role in named(worker_context).items() if each != name]
    return found if name is None else [*found, *worker_context.roles[name].apart()]
