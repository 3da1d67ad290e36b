"""The driver's side of process groups: after a failure, ranks drop broken groups and renew models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate._calls.order import Hold
from colocate._calls.pending import PendingCall
from colocate._protocol.message import Message
from colocate._system.limits import RENEWED_WITHIN_S
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.features.process_groups.failures import diverged_error, holders_error, renew_error, stranded_error
from colocate.features.process_groups.messages import (
    DefaultStarted,
    DropGroups,
    GroupsDropped,
    JoinDefault,
    LeftGroups,
    RankReport,
)

NAME = "process_groups"


@attrs.define(eq=False)
class HoldState:
    """The ranks' reports on process groups during a hold."""

    # The number of started operations and the number of ranks, by process group and slot.
    begun: dict[str, dict[int, tuple[int, int]]] = attrs.field(factory=dict)
    cut: set[str] = attrs.field(factory=set)
    in_step: bool = False  # Whether a call failed in the middle of a step of a shared model.

    def broken_groups(self) -> list[str]:
        """Return the names of broken process groups.

        A broken group is cut, is missing on a rank, or waits for an operation that some ranks never start.
        """
        names = set(self.cut)
        for name, by_slot in self.begun.items():
            counts = [*by_slot.values()]
            if len(set(counts)) > 1 or len(counts) != counts[0][1]:
                names.add(name)
        return sorted(names)


class GroupsOfGroup(GroupFeature):
    """The driver's part of the process-group feature for one group."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._joining: dict[str, set[int]] = {}  # The slots that have begun to make a default group, by rendezvous key.

    def worker_config(self) -> Sequence[int] | None:
        """Return each slot's node as a number, for torchrun's environment variables.

        Without `default_group` this is None, and without torchrun's environment the list is empty.
        """
        declared, workers = self._worker_group.declared, self._worker_group.workforce.workers
        if not declared.default_group:
            return None
        nodes = [worker.boot.node for worker in workers] if declared.torchrun else []
        return [nodes.index(node) for node in nodes]

    def on_restarted(self) -> None:
        """Forget which slots have started to make a default process group, because the workers are new."""
        self._joining.clear()

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a rank's answer to `DropGroups`, or a notification that a slot has begun to make the default group."""
        worker_group = self._worker_group
        if isinstance(message, DefaultStarted):
            with worker_group.order.lock:
                slots = self._joining.setdefault(message.key, set())
                if not slots:
                    worker_group.send(
                        [slot for slot in worker_group.live_slots() if slot != worker.slot], JoinDefault()
                    )
                slots.add(worker.slot)
                if len(slots) == worker_group.size:  # A later message with this key starts a new attempt.
                    del self._joining[message.key]
            return
        assert isinstance(message, GroupsDropped)
        error = None
        if message.failure is not None:
            error = partial(renew_error, worker_group, worker.slot, message.failure, body)
        elif message.holders:
            error = partial(holders_error, worker_group, worker.slot, message.holders)
        worker_group.order.finish_phase(worker.slot, message.number, error)

    def on_call_report(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Record how many updates a rank made in a call, and whether the call has started operations."""
        call.parts = {**call.parts, NAME: {**call.parts.get(NAME, {}), slot: RankReport(*plain)}}

    def on_rank_halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Tell the ranks that aren't back in the hold yet that this rank starts no further operations."""
        if hold.lane:
            return
        report = RankReport(*plain or ())
        state: HoldState = hold.parts.setdefault(NAME, HoldState())
        waiting = hold.waiting - {slot}
        if waiting and (report.operations or state.begun):
            self._worker_group.send(sorted(waiting), LeftGroups(hold.number, slot, report.operations))
        state.in_step = state.in_step or report.in_step
        if is_back:
            for name, operations in report.operations.items():
                state.begun.setdefault(name, {})[slot] = operations
            state.cut.update(report.cuts)

    def on_all_halted(self, hold: Hold) -> bool:
        """Start the renewal of broken groups, or fail the group if the ranks' states have diverged."""
        worker_group = self._worker_group
        state: HoldState = hold.parts.get(NAME) or HoldState()
        broken = state.broken_groups()
        for call, done, late_slot in find_stranded(worker_group.order.pending.copy().values(), hold, state, broken):
            hold.withdrawn.add(call.seq)
            hold.later.append((call, stranded_error(worker_group, call, done, late_slot), True))
        if (diverged := find_diverged(hold)) is not None:
            worker_group.fail_group(diverged_error(worker_group, *diverged, hold.cause()))
            return True
        if not broken and not state.in_step:
            return False
        worker_group.order.start_phase(hold, "renew()", RENEWED_WITHIN_S)
        worker_group.send(sorted(hold.waiting), DropGroups(hold.number, broken, state.in_step))
        return True


def find_stranded(
    calls: Iterable[PendingCall], hold: Hold, state: HoldState, broken: Sequence[str]
) -> Iterator[tuple[PendingCall, int, int]]:
    """Yield calls that one rank has finished on a broken group while another rank of the group hasn't started.

    This happens with sends and operations that don't wait for peers. A late rank would meet the next call's operations.
    Each call comes with the slots of two such ranks.
    """
    for call in calls:
        if call.lane != hold.lane or call.seq in hold.withdrawn:
            continue
        done = [slot for slot, report in call.parts.get(NAME, {}).items() if report.begins]
        for by_slot in (state.begun.get(name, {}) for name in broken):
            ends = [next(filter(by_slot.__contains__, slots), None) for slots in (done, call.missing_slots())]
            if ends[0] is not None and ends[1] is not None:
                yield call, ends[0], ends[1]
                break


def find_diverged(hold: Hold) -> tuple[PendingCall, Mapping[int, int]] | None:
    """Return a call that left ranks in different states, with the number of updates by slot, or None."""
    for call in hold.failed_calls():
        reports = call.parts.get(NAME, {})
        updates = {slot: reports[slot].updates if slot in reports else 0 for slot in call.targets}
        if len(set(updates.values())) > 1 or any(step_events % 2 for step_events in updates.values()):
            return call, updates
    return None
