"""The driver's side of the memory feature: budgets, marks for sleeping roles, and questions to workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from colocate._calls.records import MoveRecord
from colocate._calls.sending import Draft
from colocate._protocol.message import Message
from colocate._role.method import TAGS
from colocate._system.deadline import Deadline
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, MemoryBudgetError
from colocate.features.memory import calls
from colocate.features.memory.marks import Sleepers
from colocate.features.memory.messages import Ledger, LedgerReport, MemoryMoved, NeighbourMemory, RoleHoldings
from colocate.features.memory.questions import LedgerRequests
from colocate.features.memory.tables import GroupMemory, SlotMemory, slot_memory


class MemoryOfGroup(GroupFeature):
    """The driver's part of the memory feature for one group.

    Attributes:
        sleepers: Marks for roles that may have sleeping memory. A mark may outlast the sleep; workers know the truth.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._ledgers = LedgerRequests(worker_group)
        self.sleepers = Sleepers()
        for role in worker_group.roles if worker_group.home.attachment is not None else ():
            self.sleepers.add_marks(role, TAGS, until_woken=False)  # An earlier driver may have put the role to sleep.
        if worker_group.declared.budgets:
            worker_group.frees_first = True

    # -- hooks

    def worker_config(self) -> tuple[Any, str | None]:
        """Return the budgets and the folder for sleeping memory. The folder is None if workers may choose one."""
        return self._worker_group.declared.budgets.encode(), self._worker_group.services.spill_dir

    def role_configs(self) -> Mapping[str, bool]:
        """Return True for each role with `sleep="vmm"`, by name: memory of such a role keeps fixed addresses."""
        return {name: True for name, spec in self._worker_group.declared.specs.items() if spec.sleep == "vmm"}

    def on_restarted(self) -> None:
        """Reset the state for new workers, which have no sleeping memory and no pending questions."""
        self._ledgers = LedgerRequests(self._worker_group)
        self.sleepers.clear_marks()

    def on_failed(self, error: ColocateError) -> None:
        """Fail the pending questions about memory."""
        self._ledgers.fail_requests(error)

    def prepend_calls(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Insert a wake call before each call that may need sleeping memory."""
        return calls.prepend_wakes(self._worker_group, self.sleepers, drafts) if self.sleepers.marks else drafts

    def on_worker_started(self, worker: Worker) -> None:
        """Send a new worker the memory use of other groups' roles on the slot."""
        home = self._worker_group.home
        with home.neighbours_lock:
            for other in home.slot_neighbours(self._worker_group, worker.slot):
                holds = other.parts.get("memory", {})
                # Send the empty holdings of an exited worker, too: an earlier driver may have sent outdated holdings.
                if holds or other.exit is not None:
                    worker.send(NeighbourMemory(other.boot.group, holds))

    def on_worker_ended(self, worker: Worker) -> None:
        """Notify other groups on the slot that an exited worker holds no memory any more."""
        self._share_holdings(worker, RoleHoldings({}))

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's report on memory use, or a notification that memory of a role was moved."""
        match message:
            case LedgerReport():
                if message.ledger is not None:
                    for name, of_roles in message.ledger.feature_reports.items():
                        self._worker_group.get_part(name).on_roles_described(of_roles)
                self._ledgers.on_answer(worker, message)
            case RoleHoldings():
                self._share_holdings(worker, message)
            case MemoryMoved():
                group = self._worker_group
                rank, kind = group.roles[message.role].slots.index(worker.slot), "sleep" if message.asleep else "wake"
                movement = message.nbytes, message.start, message.end, message.whole, message.why
                how = message.in_call, message.kept_awake
                record = MoveRecord(group.name, message.role, rank, kind, *movement, *how)
                group.services.notify_observers("colocate_memory_moved", record)
            case _:
                raise AssertionError(message)

    def handover_state(self) -> dict[str, list[str]] | None:
        """Return the tags of sleeping memory that calls don't wake, by role; None without such memory."""
        return self.sleepers.tags_until_woken or None

    def resume_handover(self, kept: dict[str, list[str]]) -> None:
        """Restore the tags of sleeping memory that calls don't wake, as recorded by an earlier driver."""
        for role, tags in kept.items():
            self.sleepers.add_marks(role, tags, until_woken=True)

    def _share_holdings(self, worker: Worker, message: RoleHoldings) -> None:
        group, home = self._worker_group, self._worker_group.home
        with home.neighbours_lock:
            worker.parts["memory"] = message.roles
            # After this driver's close, workers of a detached pool keep their memory, so don't report it as freed.
            for other in home.slot_neighbours(group, worker.slot) if home.closed_by is None else ():
                other.send(NeighbourMemory(group.name, message.roles))

    # -- for users

    def ask_memory(self, deadline: Deadline) -> GroupMemory:
        """Return the memory use of all workers of the group."""
        group = self._worker_group
        workers = group.workforce.workers
        ledgers = self._ledgers.request_all([worker.slot for worker in workers], deadline)
        return GroupMemory(
            group.name,
            tuple(slot_memory(group, *pair) for pair in zip(workers, ledgers, strict=True)),
            **{name: value for part in group.parts.values() for name, value in part.memory_fields().items()},
        )

    def ask_each(self, deadline: Deadline) -> tuple[dict[int, SlotMemory], Exception | None]:
        """Return the memory use of each slot that answers, and the first error, or None if all slots answer."""
        group = self._worker_group
        workers = {worker.slot: worker for worker in group.workforce.workers}
        answers = self._ledgers.request_each([*workers], deadline)
        memory = {
            slot: slot_memory(group, workers[slot], ledger)
            for slot, ledger in answers.items()
            if isinstance(ledger, Ledger)
        }
        return memory, next((error for error in answers.values() if isinstance(error, Exception)), None)

    def sleep_role(
        self,
        role: str,
        tags: Sequence[str] | None,
        timeout: float | None,
        on_call: str,
        discard: Sequence[str],
    ) -> int:
        """Put memory of a role to sleep; see `ColocatedGroup.sleep`."""
        with self._explain_shortage():
            return calls.sleep_role(self._worker_group, role, tags, timeout, on_call, discard)

    def wake_role(self, role: str, tags: Sequence[str] | None, timeout: float | None) -> int:
        """Wake memory of a role; see `ColocatedGroup.wake`."""
        with self._explain_shortage():
            return calls.wake_role(self._worker_group, role, tags, timeout)

    @contextmanager
    def _explain_shortage(self) -> Iterator[None]:
        """A context manager that adds the group's memory table to a `MemoryBudgetError`, if workers answer in time."""
        try:
            yield
        except MemoryBudgetError as error:
            with suppress(ColocateError, TimeoutError):
                error.add_note(str(self.ask_memory(Deadline(LEDGERS_WITHIN_S))))
            raise
