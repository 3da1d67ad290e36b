"""The worker's side of the memory feature: measures roles, checks budgets, and puts memory to sleep."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

from colocate._protocol.ledger import TAGS, Purpose
from colocate._protocol.message import Message
from colocate._role.budget import Budgets
from colocate._role.context import context
from colocate._role.method import method
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import JobThread, format_error, report_exception
from colocate._system.numbers import format_size
from colocate.errors import CapabilityError
from colocate.features.memory.ledger import Accounts, InspectionError
from colocate.features.memory.messages import SLEEP, WAKE, AskLedger, LedgerReport, MemoryMoved, NeighbourMemory
from colocate.features.memory.sleep import Outcome, Sleeper
from colocate.features.memory.turns import TurnScheduler
from colocate.features.memory.vmm import CountElsewhere, keep_addresses
from colocate.worker.context import WorkerContext
from colocate.worker.holdings import Objects, find_holdings
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.role_instance import RoleInstance


class MemoryOfWorker(WorkerFeature, calls={SLEEP: "sleep", WAKE: "wake"}):
    """The memory feature in a worker: measures the roles' memory, checks budgets, and puts roles to sleep.

    Attributes:
        sleeper: Puts roles to sleep and wakes roles.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self.sleeper = Sleeper(worker_context)
        self._accounts = Accounts(worker_context, self.sleeper)
        self._turns = TurnScheduler(worker_context, self.sleeper, self._accounts)
        # The result of `keep_addresses` for the constructor that has just run.
        self._count_elsewhere: CountElsewhere | None = None
        # Inspections run on a separate thread, because a role's `device_state` may be slow and the lane may be busy.
        self._ledger_thread = JobThread(
            f"colocate-ledger-{worker_context.boot.worker}", lambda error: report_exception()
        )

    # -- hooks

    def on_message(self, message: Message, body: Any) -> None:
        """Answer a question about memory on a separate thread, or record the memory that another group's roles hold."""
        match message:
            case AskLedger():
                try:
                    self._ledger_thread.call_soon(partial(self._send_ledger, message.token))
                except RuntimeError as error:  # No thread could be started for the inspection.
                    self._worker_context.send_message(LedgerReport(message.token, None, "", format_error(error)))
            case NeighbourMemory():
                # Build a new mapping, because the lane may be reading the old one.
                groups = {name: roles for name, roles in self._accounts.neighbours.items() if name != message.group}
                self._accounts.neighbours = {**groups, message.group: message.roles} if message.roles else groups
            case _:
                raise AssertionError(message)

    def configure(self, plain: tuple[Any, str | None]) -> None:
        """Set the memory budgets and the folder for files with sleeping memory."""
        budgets, self.sleeper.spill_dir = plain
        self._accounts.budgets = Budgets.decode(budgets)
        if any(not limit.device for limit in self._accounts.budgets.limits):
            # A budget of host memory leaves no room for cached copies.
            self._worker_context.store.copies_bytes = 0
        self._turns.set_budgets()
        self.sleeper.prepare_offload(self._accounts.budgets.swap)

    def around_construction(self, role: str) -> AbstractContextManager[None]:
        """Return a context manager that puts all other roles to sleep for a constructor, if roles take turns."""
        return self._turns.free_for_construction(role)

    @contextlib.contextmanager
    def around_constructor(self, role: str, plain: bool | None) -> Iterator[None]:
        """A context manager for a constructor; with `sleep="vmm"` new tensors keep their addresses across a sleep."""
        if plain is None:
            yield
            return
        with keep_addresses(self._worker_context.boot.device) as self._count_elsewhere:
            yield

    def on_role_built(self, role: RoleInstance, plain: bool | None) -> None:
        """Refuse a role with `sleep="vmm"` if some of the role's weights would change addresses in a sleep."""
        if plain is not None:
            role.parts["memory"] = plain
        if self._count_elsewhere is not None:
            _check_addresses(role.instance, self._worker_context, self._count_elsewhere)
            self._count_elsewhere = None

    def before_call(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Wake the memory for a call if roles take turns. Refuse the call if memory that it needs is asleep."""
        if self._turns.takes_turns:
            self._turns.enter_call(seq, role, spec)
        if self.sleeper.asleep.roles:
            self.sleeper.check_awake(role, spec)

    def after_call(self, seq: int) -> None:
        """Stop keeping roles awake for a call that has ended."""
        self._turns.leave_call(seq)

    def check_result(self, role: str | None, label: str, kept: Mapping[str, Any] | None) -> None:
        """Check the memory budgets after a call, including results that will be stored on the worker (`kept`)."""
        self._turns.check_budget(role, label, kept)

    def on_holdings_changed(self, role: str | None) -> None:
        """Mark a role's memory as changed, and notify other groups on the slot. None stands for all roles."""
        self._accounts.mark_changed(role)
        self._accounts.share_holdings()

    def on_residents_freed(self) -> None:
        """Notify other groups on the slot that this worker has freed memory."""
        if self._accounts.counts_others:
            self._worker_context.lane.run_action(self._accounts.share_holdings)

    def keep_awake(self, role: RoleInstance, why: str) -> AbstractContextManager[None]:
        """Return a context manager that keeps all memory of a role awake."""
        return self._turns.hold_awake(role, why)

    def wake_memory(self, role: str, tags: Sequence[str]) -> None:
        """Wake a role's memory with these tags if roles take turns. Otherwise raise an error if that memory sleeps."""
        self._turns.wake_for_use(role, tags)

    def offloaded_storages(self) -> Collection[int]:
        """Return the keys of sleeping storages."""
        return self.sleeper.asleep.offloaded

    def on_driver_changed(self) -> None:
        """Send the roles' memory use to a driver that has taken over the group."""
        self._worker_context.lane.run_action(partial(self._accounts.share_holdings, anew=True))

    def close(self) -> None:
        """Drop sleeping memory, and end without waiting for a running inspection."""
        self._ledger_thread.close(0.0)
        self.sleeper.offload.close()

    # -- for observers

    def describe(self) -> str:
        """Return a text about the memory of all roles, to be added to an error."""
        return self._accounts.describe()

    def role_bytes(self) -> tuple[Mapping[str, tuple[int, int]] | None, str | None]:
        """Return each role's bytes in memory and asleep, and None. On an error, return None and the error's text."""
        try:
            ledger = self._accounts.build_ledger()
        except InspectionError as error:
            return None, str(error)
        except Exception as error:  # An inspection may raise any error, such as a CUDA error.
            return None, format_error(error)
        names = ledger.roles.keys() | ledger.asleep.keys()
        return {name: (sum(ledger.roles.get(name, {}).values()), ledger.asleep.get(name, 0)) for name in names}, None

    @property
    def is_looking(self) -> bool:
        """Whether the lane has a pending inspection of gradients, which doesn't count as a call."""
        return self._accounts.gradients.is_due

    def _send_ledger(self, token: int) -> None:
        try:
            report = LedgerReport(token, self._accounts.build_ledger())
        except InspectionError as error:
            report = LedgerReport(token, None, error.role, error.trace)
        except Exception:  # An inspection may raise any error, such as a CUDA error.
            report = LedgerReport(token, None, "", traceback.format_exc())
        self._worker_context.send_message(report)

    # -- sleep and wake

    @method
    def sleep(self, role: str, tags: Sequence[str], discard: Sequence[str], why: str) -> Outcome:
        """Put memory of a role to sleep, and report the move to the driver with the reason (`why`)."""
        start, before, had = time.time(), self.sleeper.asleep.sleeping_tags(role), self._asleep_bytes(role)
        outcome = self.sleeper.sleep_on_all(role, tags, discard, context().world_size)
        more = self._asleep_bytes(role) - had  # Like the report of a wake, this includes bytes that the device keeps.
        if more or self.sleeper.asleep.sleeping_tags(role) != before:
            self._report_move(role, True, more, start, why, self.sleeper.asleep.awake_bytes(role, tags))
        return outcome

    @method
    def wake(self, role: str, tags: Sequence[str], why: str) -> Outcome:
        """Wake memory of a role, and report the move to the driver with the reason (`why`)."""
        self._turns.make_room(role)
        start, before = time.time(), self.sleeper.asleep.sleeping_tags(role)
        outcome = self.sleeper.wake_on_all(role, tags, context().world_size)
        if self.sleeper.asleep.sleeping_tags(role) != before:
            self._report_move(role, False, outcome.nbytes, start, why)
        return outcome

    def _asleep_bytes(self, role: str) -> int:
        tags = self.sleeper.asleep.sleeping_tags(role)
        return self.sleeper.asleep.plan_restore(role, tags).size if tags else 0

    def _report_move(
        self,
        role: str,
        asleep: bool,
        nbytes: int,
        start: float,
        why: str,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._accounts.on_moved(role)
        whole = asleep and len(self.sleeper.asleep.sleeping_tags(role)) == len(TAGS)
        self._worker_context.send_message(
            MemoryMoved(role, asleep, nbytes, start, time.time(), whole, why, kept_awake=dict(kept))
        )


def _check_addresses(instance: object, worker_context: WorkerContext, elsewhere: CountElsewhere) -> None:
    """Raise an error unless all weights and buffers of a new role keep their addresses across a sleep.

    Other tensors needn't keep theirs, for example gradients, which autograd's threads create.

    Raises:
        CapabilityError: Weights or buffers wouldn't keep their addresses.
    """
    device = worker_context.boot.device
    instances = [role.instance for role in worker_context.roles.values() if role.name is not None]
    holdings, _ = find_holdings(instance, apart=instances, storages=partial(Objects, device))
    storages: dict[int, Any] = {}
    for pieces in (holdings[Purpose.PARAMETERS], holdings[Purpose.BUFFERS]):
        assert isinstance(pieces, Objects)
        storages |= {key: pieces.storages[key] for key in pieces.get(device, ())}
    if nbytes := elsewhere(storages.values()):
        raise CapabilityError(
            f'sleep="vmm": {format_size(nbytes)} of weights and buffers on {device} would have other addresses after a '
            "sleep, as other threads have made them than that which runs the constructor. Models of transformers are "
            'read so (device_map=): set env={"HF_DEACTIVATE_ASYNC_LOAD": "1"} in the pool, or read them on the host '
            "and move them with .to; or leave sleep= out"
        )
