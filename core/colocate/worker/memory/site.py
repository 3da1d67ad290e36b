"""A worker as the parts of it that look after its memory know it."""

from __future__ import annotations

from typing import Any, Protocol

from colocate._protocol.message import Message
from colocate.executor import Boot
from colocate.worker.device import Device
from colocate.worker.lane import Lane
from colocate.worker.memory.process_memory import ProcessMemory
from colocate.worker.residents.store import Store
from colocate.worker.serving.hosted import HostedRole
from colocate.worker.torch_groups.settings import Setting


class Worker(Protocol):
    """What they need of it; see `Site`."""

    boot: Boot
    store: Store
    roles: dict[Any, HostedRole]
    lane: Lane
    spill_dir: str | None
    in_process: bool
    process: ProcessMemory | None
    device: Device
    setting: Setting

    def ask(self, question: Message) -> Any:
        """Ask the driver."""
        ...

    def say(self, message: Message) -> None:
        """Tell the driver."""
        ...
