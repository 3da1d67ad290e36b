"""Process groups, the driver's half: a phase of the hold, in which ranks drop those of no use and renew models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate._calls.order import Hold
from colocate._calls.pending import PendingCall
from colocate._protocol.message import Message
from colocate._system.limits import RENEWED_WITHIN_S
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.features.process_groups.failures import diverged_error, holders_error, renew_error, stranded_error
from colocate.features.process_groups.messages import DropGroups, GroupsDropped, Join, Joining, Left, Told

NAME = "process_groups"


@attrs.define(eq=False)
class HoldState:
    """What ranks have told of process groups in a hold."""

    begun: dict[str, dict[int, tuple[int, int]]] = attrs.field(factory=dict)  # operations of each, by slot
    cut: set[str] = attrs.field(factory=set)
    in_step: bool = False  # a call has raised when models that ranks share were in the middle of a step

    def broken(self) -> list[str]:
        """The process groups that are of no use any more, by name.

        One of them is cut, isn't there on all of its ranks, or waits for an operation that some of these never begin.
        """
        found = set(self.cut)
        for name, by_slot in self.begun.items():
            told = [*by_slot.values()]
            if len(set(told)) > 1 or len(told) != told[0][1]:
                found.add(name)
        return sorted(found)


class GroupsOfGroup(OfGroup):
    """What a group knows of its ranks' process groups, which is from hold to hold."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._joining: dict[str, set[int]] = {}  # the slots that make a default group, by what they meet under

    def gives(self) -> Sequence[int] | None:
        """Return, where the default group is there before the roles, what torchrun's environment needs, or nothing.

        That is, which slots lie on one node: by a number for each.
        """
        declared, workers = self._worker_group.declared, self._worker_group.workforce.workers
        if not declared.default_group:
            return None
        nodes = [worker.boot.node for worker in workers] if declared.torchrun else []
        return [nodes.index(node) for node in nodes]

    def renewed(self) -> None:
        """Forget who joins whom: the workers are new ones."""
        self._joining.clear()

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Hear that a rank has renewed, or makes the default group."""
        worker_group = self._worker_group
        if isinstance(message, Joining):
            with worker_group.order.lock:
                slots = self._joining.setdefault(message.key, set())
                if not slots:
                    worker_group.send([slot for slot in worker_group.live() if slot != worker.slot], Join())
                slots.add(worker.slot)
                if len(slots) == worker_group.size:  # who asks once more tries again
                    del self._joining[message.key]
            return
        assert isinstance(message, GroupsDropped)
        error = None
        if message.failure is not None:
            error = partial(renew_error, worker_group, worker.slot, message.failure, body)
        elif message.holders:
            error = partial(holders_error, worker_group, worker.slot, message.holders)
        worker_group.order.phase_over(worker.slot, message.number, error)

    def ended(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Note how many updates a rank has made in a call, and whether it has begun operations."""
        call.parts = {**call.parts, NAME: {**call.parts.get(NAME, {}), slot: Told(*plain)}}

    def halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Tell the ranks that aren't back: they mustn't wait for one that begins no operation any more."""
        if hold.lane:
            return
        told = Told(*plain or ())
        state: HoldState = hold.parts.setdefault(NAME, HoldState())
        others = hold.waiting - {slot}
        if others and (told.operations or state.begun):
            self._worker_group.send(sorted(others), Left(hold.number, slot, told.operations))
        state.in_step = state.in_step or told.in_step
        if is_back:
            for name, operations in told.operations.items():
                state.begun.setdefault(name, {})[slot] = operations
            state.cut.update(told.cuts)

    def all_back(self, hold: Hold) -> bool:
        """Have what is broken renewed, if anything is; fail where ranks have no common state any more."""
        worker_group = self._worker_group
        state: HoldState = hold.parts.get(NAME) or HoldState()
        broken = state.broken()
        for call, done, left in stranded(worker_group.order.pending.copy().values(), hold, state, broken):
            hold.withdrawn.add(call.seq)
            hold.later.append((call, stranded_error(worker_group, call, done, left), True))
        if (diverged := diverged_update(hold)) is not None:
            worker_group.fail(diverged_error(worker_group, *diverged, hold.cause()))
            return True
        if not broken and not state.in_step:
            return False
        worker_group.order.begin_phase(hold, "renew()", RENEWED_WITHIN_S)
        worker_group.send(sorted(hold.waiting), DropGroups(hold.number, broken, state.in_step))
        return True


def stranded(
    calls: Iterable[PendingCall], hold: Hold, state: HoldState, broken: Sequence[str]
) -> Iterator[tuple[PendingCall, int, int]]:
    """Yield calls that a rank has done with a group that is dropped, and another one of the group hasn't begun.

    Of an operation that ranks don't wait for, or that sends: who comes later would meet the next call's. With each, the
    slots of two such ranks.
    """
    for call in calls:
        if call.lane != hold.lane or call.seq in hold.withdrawn:
            continue
        done = [slot for slot, told in call.parts.get(NAME, {}).items() if told.begins]
        for by_slot in (state.begun.get(name, {}) for name in broken):
            ends = [next(filter(by_slot.__contains__, slots), None) for slots in (done, call.missing())]
            if ends[0] is not None and ends[1] is not None:
                yield call, ends[0], ends[1]
                break


def diverged_update(hold: Hold) -> tuple[PendingCall, Mapping[int, int]] | None:
    """A call after which its ranks don't have one state of what they share, and their updates in it, by slot."""
    for call in hold.ended():
        told = call.parts.get(NAME, {})
        updates = {slot: told[slot].updates if slot in told else 0 for slot in call.targets}
        if len(set(updates.values())) > 1 or any(step_events % 2 for step_events in updates.values()):
            return call, updates
    return None
