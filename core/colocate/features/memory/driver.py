"""Memory of a group's roles, the driver's half: what the workers say of it when they are asked."""

from __future__ import annotations

from typing import Any

from colocate._protocol.ledger import Ledger
from colocate._protocol.message import Message
from colocate._system.deadline import Deadline
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError
from colocate.features.memory.messages import LedgerTold
from colocate.features.memory.questions import Ledgers
from colocate.features.memory.tables import GroupMemory, SlotMemory, slot_memory


class MemoryOfGroup(OfGroup):
    """What a driver knows of the memory of a group's roles."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._ledgers = Ledgers(worker_group)

    # -- hooks

    def renewed(self) -> None:
        """Ask the new workers from now on."""
        self._ledgers = Ledgers(self._worker_group)

    def failed(self, error: ColocateError) -> None:
        """Have nobody wait for an answer any more."""
        self._ledgers.fail(error)

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Take a worker's answer."""
        assert isinstance(message, LedgerTold)
        if message.ledger is not None:
            for name, of_roles in message.ledger.told.items():
                self._worker_group.part(name).told(of_roles)
        self._ledgers.answered(worker, message)

    # -- for users

    def asked(self, deadline: Deadline) -> GroupMemory:
        """Ask all workers of the group what their memory is used for."""
        group = self._worker_group
        workers = group.workforce.workers
        ledgers = self._ledgers.get([worker.slot for worker in workers], deadline)
        return GroupMemory(
            group.name,
            tuple(slot_memory(group, *each) for each in zip(workers, ledgers, strict=True)),
            **{name: value for part in group.parts.values() for name, value in part.memory().items()},
        )

    def asked_each(self, deadline: Deadline) -> tuple[dict[int, SlotMemory], Exception | None]:
        """As `asked`, by slot and as far as workers answer; and why one doesn't."""
        group = self._worker_group
        workers = {worker.slot: worker for worker in group.workforce.workers}
        told = self._ledgers.each([*workers], deadline)
        found = {
            slot: slot_memory(group, workers[slot], ledger)
            for slot, ledger in told.items()
            if isinstance(ledger, Ledger)
        }
        return found, next((error for error in told.values() if isinstance(error, Exception)), None)
