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
from colocate._system.jobs import JobThread, error_text, report_exception
from colocate._system.numbers import size_text
from colocate.errors import CapabilityError
from colocate.features.memory.ledger import Accounts, LookError
from colocate.features.memory.messages import SLEEP, WAKE, AskLedger, Beside, LedgerTold, Moved
from colocate.features.memory.sleep import Outcome, Sleeper
from colocate.features.memory.turns import TurnScheduler
from colocate.features.memory.vmm import Elsewhere, kept_addresses
from colocate.worker.context import WorkerContext
from colocate.worker.holdings import Objects, held_by
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.role_instance import RoleInstance


class MemoryOfWorker(OfWorker, calls={SLEEP: "sleep", WAKE: "wake"}):
    """The memory feature in a worker: measures the roles' memory, checks budgets, and puts roles to sleep.

    Attributes:
        sleeper: Puts roles to sleep and wakes roles.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self.sleeper = Sleeper(worker_context)
        self._accounts = Accounts(worker_context, self.sleeper)
        self._turns = TurnScheduler(worker_context, self.sleeper, self._accounts)
        # The result of `kept_addresses` for the constructor that has just run.
        self._elsewhere: Elsewhere | None = None
        # Inspections run on a separate thread, because a role's `device_state` may be slow and the lane may be busy.
        self._looks = JobThread(f"colocate-ledger-{worker_context.boot.worker}", lambda error: report_exception())

    # -- hooks

    def heard(self, message: Message, body: Any) -> None:
        """Answer a question about memory on a separate thread, or record the memory that another group's roles hold."""
        match message:
            case AskLedger():
                try:
                    self._looks.soon(partial(self._tell_ledger, message.token))
                except RuntimeError as error:  # No thread could be started for the inspection.
                    self._worker_context.say(LedgerTold(message.token, None, "", error_text(error)))
            case Beside():
                # Build a new mapping, because the lane may be reading the old one.
                groups = {name: roles for name, roles in self._accounts.beside.items() if name != message.group}
                self._accounts.beside = {**groups, message.group: message.roles} if message.roles else groups
            case _:
                raise AssertionError(message)

    def given(self, plain: tuple[Any, str | None]) -> None:
        """Set the memory budgets and the folder for files with sleeping memory."""
        budgets, self.sleeper.spill_dir = plain
        self._accounts.budgets = Budgets.read(budgets)
        if any(not limit.device for limit in self._accounts.budgets.limits):
            # A budget of host memory leaves no room for cached copies.
            self._worker_context.store.copies_bytes = 0
        self._turns.begin()
        self.sleeper.begin(self._accounts.budgets.swap)

    def constructing(self, role: str) -> AbstractContextManager[None]:
        """Return a context manager that puts all other roles to sleep for a constructor, if roles take turns."""
        return self._turns.constructing(role)

    @contextlib.contextmanager
    def making(self, role: str, plain: bool | None) -> Iterator[None]:
        """A context manager for a constructor; with `sleep="vmm"` new tensors keep their addresses across a sleep."""
        if plain is None:
            yield
            return
        with kept_addresses(self._worker_context.boot.device) as self._elsewhere:
            yield

    def built(self, role: RoleInstance, plain: bool | None) -> None:
        """Refuse a role with `sleep="vmm"` if some of the role's weights would change addresses in a sleep."""
        if plain is not None:
            role.parts["memory"] = plain
        if self._elsewhere is not None:
            _check_addresses(role.instance, self._worker_context, self._elsewhere)
            self._elsewhere = None

    def enters(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Wake the memory that a call needs if roles take turns, and refuse the call if needed memory still sleeps."""
        if self._turns.takes_turns:
            self._turns.enter(seq, role, spec)
        if self.sleeper.asleep.roles:
            self.sleeper.check(role, spec)

    def leaves(self, seq: int) -> None:
        """Release the roles that a call has kept awake."""
        self._turns.leave(seq)

    def ran(self, role: str | None, label: str, kept: Mapping[str, Any] | None) -> None:
        """Check the memory budgets after a call, including results that will be stored on the worker (`kept`)."""
        self._turns.check(role, label, kept)

    def changed(self, role: str | None) -> None:
        """Mark a role's memory as changed, and notify other groups on the slot. None stands for all roles."""
        self._accounts.changed(role)
        self._accounts.tell()

    def freed(self) -> None:
        """Notify other groups on the slot that this worker has freed memory."""
        if self._accounts.count_others:
            self._worker_context.lane.do(self._accounts.tell)

    def awake(self, role: RoleInstance, why: str) -> AbstractContextManager[None]:
        """Return a context manager that keeps all memory of a role awake."""
        return self._turns.awake(role, why)

    def have_awake(self, role: str, tags: Sequence[str]) -> None:
        """Wake a role's memory with these tags if roles take turns. Otherwise raise an error if that memory sleeps."""
        self._turns.have_awake(role, tags)

    def away(self) -> Collection[int]:
        """Return the keys of sleeping storages."""
        return self.sleeper.asleep.away

    def adopted(self) -> None:
        """Send the roles' memory use to a driver that has taken over the group."""
        self._worker_context.lane.do(partial(self._accounts.tell, anew=True))

    def close(self) -> None:
        """Drop sleeping memory, and end without waiting for a running inspection."""
        self._looks.close(0.0)
        self.sleeper.offload.close()

    # -- for observers

    def words(self) -> str:
        """Return a text about the memory of all roles, to be added to an error."""
        return self._accounts.told()

    def glimpse(self) -> tuple[Mapping[str, tuple[int, int]] | None, str | None]:
        """Return each role's bytes in memory and asleep, and None. On an error, return None and the error's text."""
        try:
            ledger = self._accounts.ledger()
        except LookError as error:
            return None, str(error)
        except Exception as error:  # An inspection may raise any error, such as a CUDA error.
            return None, error_text(error)
        names = ledger.roles.keys() | ledger.asleep.keys()
        return {name: (sum(ledger.roles.get(name, {}).values()), ledger.asleep.get(name, 0)) for name in names}, None

    @property
    def is_looking(self) -> bool:
        """Whether the lane has a pending inspection of gradients, which doesn't count as a call."""
        return self._accounts.gradients.is_due

    def _tell_ledger(self, token: int) -> None:
        try:
            report = LedgerTold(token, self._accounts.ledger())
        except LookError as error:
            report = LedgerTold(token, None, error.role, error.trace)
        except Exception:  # An inspection may raise any error, such as a CUDA error.
            report = LedgerTold(token, None, "", traceback.format_exc())
        self._worker_context.say(report)

    # -- sleep and wake

    @method
    def sleep(self, role: str, tags: Sequence[str], discard: Sequence[str], why: str) -> Outcome:
        """Put memory of a role to sleep, and report the move to the driver with the reason (`why`)."""
        start, before, had = time.time(), self.sleeper.asleep.tags(role), self._asleep(role)
        outcome = self.sleeper.sleep(role, tags, discard, context().world_size)
        more = self._asleep(role) - had  # Like the report of a wake, this includes bytes that the device keeps.
        if more or self.sleeper.asleep.tags(role) != before:
            self._tell(role, True, more, start, why, self.sleeper.asleep.kept_awake(role, tags))
        return outcome

    @method
    def wake(self, role: str, tags: Sequence[str], why: str) -> Outcome:
        """Wake memory of a role, and report the move to the driver with the reason (`why`)."""
        self._turns.make_room(role)
        start, before = time.time(), self.sleeper.asleep.tags(role)
        outcome = self.sleeper.wake(role, tags, context().world_size)
        if self.sleeper.asleep.tags(role) != before:
            self._tell(role, False, outcome.nbytes, start, why)
        return outcome

    def _asleep(self, role: str) -> int:
        tags = self.sleeper.asleep.tags(role)
        return self.sleeper.asleep.coming(role, tags).size if tags else 0

    def _tell(
        self,
        role: str,
        asleep: bool,
        nbytes: int,
        start: float,
        why: str,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._accounts.moved(role)
        whole = asleep and len(self.sleeper.asleep.tags(role)) == len(TAGS)
        self._worker_context.say(Moved(role, asleep, nbytes, start, time.time(), whole, why, kept_awake=dict(kept)))


def _check_addresses(instance: object, worker_context: WorkerContext, elsewhere: Elsewhere) -> None:
    """Raise an error unless all weights and buffers of a new role keep their addresses across a sleep.

    Other tensors needn't keep theirs, for example gradients, which autograd's threads create.

    Raises:
        CapabilityError: Weights or buffers wouldn't keep their addresses.
    """
    device = worker_context.boot.device
    instances = [role.instance for role in worker_context.roles.values() if role.name is not None]
    holdings, _ = held_by(instance, apart=instances, storages=partial(Objects, device))
    storages: dict[int, Any] = {}
    for pieces in (holdings[Purpose.PARAMETERS], holdings[Purpose.BUFFERS]):
        assert isinstance(pieces, Objects)
        storages |= {key: pieces.storages[key] for key in pieces.get(device, ())}
    if nbytes := elsewhere(storages.values()):
        raise CapabilityError(
            f'sleep="vmm": {size_text(nbytes)} of weights and buffers on {device} would have other addresses after a '
            "sleep, as other threads have made them than that which runs the constructor. Models of transformers are "
            'read so (device_map=): set env={"HF_DEACTIVATE_ASYNC_LOAD": "1"} in the pool, or read them on the host '
            "and move them with .to; or leave sleep= out"
        )
