"""The present status of a runtime's groups, as shown by `colocate top`."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from colocate._api.connection import Connection
from colocate._calls.order import Stacks
from colocate._calls.pending import PendingCall
from colocate._calls.records import CallRecord, MoveRecord
from colocate._system.deadline import Deadline
from colocate._system.limits import STACKS_WITHIN_S
from colocate._system.recent import RECENT_S, Interval, RecentSpans
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import CapabilityError
from colocate.features.looking.idle import IdleTracker, Slot, TimedCall, call_label, measure_idle

_LEDGERS_WITHIN_S = 1.0
_MOST_RANKS = 20_000
_STACKS_WITHIN_S = STACKS_WITHIN_S + 1.0


class RecentCalls(RecentSpans[tuple[str, str, int]]):
    """An observer that records how long each role ran on each slot within the last seconds."""

    def __init__(self, slot_of: Callable[[str, str, int], int]) -> None:
        """Start observing.

        Args:
            slot_of: Returns the slot of a rank, given the group, the role and the rank.
        """
        super().__init__()
        self._since = time.time()
        self._idling = IdleTracker(slot_of, _MOST_RANKS)
        self._idling_lock = threading.Lock()

    def idle_shares(
        self, now: float, running: Iterable[TimedCall], slots: Iterable[Slot]
    ) -> dict[Slot, dict[str, float]]:
        """Return the share of the last seconds in which each slot ran nothing, by cause."""
        since = max(self._since, now - RECENT_S)
        with self._idling_lock:
            self._idling.forget_before(since)
            calls, moves = self._idling.copy_records()
        causes = measure_idle([*calls, *running], moves, dict.fromkeys(slots, (since, now)))
        return {slot: {why: seconds / RECENT_S for why, seconds in shares.items()} for slot, shares in causes.items()}

    def colocate_call_finished(self, record: CallRecord) -> None:
        """Record a finished call."""
        with self._idling_lock:
            self._idling.add_call(record)
            self._idling.forget_before(record.finished - 2 * RECENT_S)
        for rank, start, end in record.ran:
            self.add_span((record.group, record.role, rank), start, end)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """Record a sleep or wake of a role. The time counts as busy, unless a call's time includes it."""
        with self._idling_lock:
            self._idling.add_move(record)
        if not record.in_call:
            self.add_span((record.group, record.role, record.rank), record.start, record.end)


def describe_groups(connection: Connection, recent: RecentCalls) -> list[dict[str, Any]]:
    """Return the status of a runtime's groups as plain data: each slot's call and queue, and memory by role."""
    now, worker_groups = time.time(), list(connection.worker_groups.values())
    more: list[tuple[tuple[str, str, int], float, float]] = []
    # Start and end on each slot that has begun the call. The end of a running call is now.
    unfinished: dict[PendingCall, dict[Slot, Interval]] = {}
    for worker_group in worker_groups:
        running = [(call, slot, since, now) for slot, (call, since) in _running_calls(worker_group, recent).items()]
        for call, slot, start, end in [*_finished_parts(worker_group), *running]:
            unfinished.setdefault(call, {})[worker_group.name, slot] = start, end
            if call.role in worker_group.roles:
                rank = worker_group.roles[call.role].slots.index(slot)
                more.append(((worker_group.name, call.role, rank), start, end))
    shares = recent.get_shares(now, more)
    slots = [
        (worker_group.name, item.slot) for worker_group in worker_groups for item in worker_group.workforce.workers
    ]
    called = [
        TimedCall(call_label(call.role, call.method), call.submitted, call.submitted, ran)
        for call, ran in unfinished.items()
    ]
    waits = recent.idle_shares(now, called, slots)
    return [_describe_group(worker_group, shares, recent, waits) for worker_group in worker_groups]


def collect_stacks(connection: Connection) -> list[dict[str, Any]]:
    """Return the stacks of a runtime's workers as plain data. Stacks of silent workers are read by the keepers."""
    results: list[dict[str, Any]] = []
    for worker_group in list(connection.worker_groups.values()):
        answers: queue.SimpleQueue[Stacks] = queue.SimpleQueue()
        slots = worker_group.live_slots()
        worker_group.order.stacks.ask_stacks(slots, answers.put)
        with suppress(queue.Empty):  # The runtime may have just been closed.
            reports, stopped = answers.get(timeout=_STACKS_WITHIN_S), worker_group.stopped_slots()
            for slot in slots:
                words = [f"{stopped[slot]}\n"] if slot in stopped else []
                stack = "".join([*words, reports.describe_slot(slot)])
                results.append(
                    {"group": worker_group.name, "slot": slot, "node": worker_group.node(slot), "stack": stack}
                )
    return results


def _running_calls(worker_group: WorkerGroup, recent: RecentCalls) -> dict[int, tuple[PendingCall, float]]:
    """Return each slot's running call and the call's start, which is never before the end of the previous call."""
    first: dict[int, PendingCall] = {}
    # `done` has, by slot, the end of the last call that other slots still run.
    ends, done = recent.get_ends(), {slot: end for _, slot, _, end in _finished_parts(worker_group)}
    for call in list(worker_group.order.pending.values()):
        for slot in call.missing_slots():
            first.setdefault(slot, call)
    calls = {}
    for slot, call in first.items():
        ranks = {name: info.slots.index(slot) for name, info in worker_group.roles.items() if slot in info.slots}
        ranks[""] = slot  # For a function, the rank is the slot, because functions run on all slots.
        ended = (ends.get((worker_group.name, name, rank), 0.0) for name, rank in ranks.items())
        calls[slot] = call, max(call.submitted, done.get(slot, 0.0), *ended)
    return calls


def _finished_parts(worker_group: WorkerGroup) -> list[tuple[PendingCall, int, float, float]]:
    """Return the finished parts of calls that are unfinished on other slots.

    Observers get records of finished calls only.
    """
    calls = list(worker_group.order.pending.values())
    return [(call, call.targets[index], start, end) for call in calls for index, start, end in list(call.spans)]


def _describe_group(
    worker_group: WorkerGroup,
    shares: Mapping[tuple[str, str, int], float],
    recent: RecentCalls,
    waits: Mapping[Slot, Mapping[str, float]],
) -> dict[str, Any]:
    # A worker that starts or hangs doesn't report memory, but the rest of the status is still useful.
    try:
        held, trouble = cast("Any", worker_group.get_part("memory")).ask_each(Deadline(_LEDGERS_WITHIN_S))
    except CapabilityError as error:
        held, trouble = {}, error
    waiting = Counter(slot for call in list(worker_group.order.pending.values()) for slot in call.missing_slots())
    # The running calls are read again, because calls were made while the workers answered.
    now, running = time.time(), _running_calls(worker_group, recent)
    slots = []
    stopped = worker_group.stopped_slots()
    behind = getattr(worker_group.parts.get("weights"), "last_behind", {})
    for worker in worker_group.workforce.workers:
        call, since = running.get(worker.slot, (None, now))
        roles = [
            {
                "role": name,
                "rank": (rank := info.slots.index(worker.slot)),
                "busy": round(shares.get((worker_group.name, name, rank), 0.0), 4),
                **_describe_memory(held.get(worker.slot), name),
                **({"weights_behind": behind[name]} if name in behind else {}),
            }
            for name, info in worker_group.roles.items()
            if worker.slot in info.slots
        ]
        slots.append(
            {
                "slot": worker.slot,
                "node": worker.boot.node,
                "device": worker.boot.device,
                "pid": worker.pid,
                "queue": max(0, waiting[worker.slot] - 1),
                "call": None if call is None else call.label,
                "age": None if call is None else round(max(0.0, now - since), 3),
                "idle": {why: round(share, 4) for why, share in waits[worker_group.name, worker.slot].items()},
                **({} if (gpu := _describe_gpu(worker_group, worker.slot)) is None else {"gpu": gpu}),
                **({} if (why := stopped.get(worker.slot)) is None else {"stopped": why}),
                "roles": roles,
            }
        )
    return {
        "group": worker_group.name,
        "state": worker_group.life.state.value,
        "generation": worker_group.generation,
        "slots": slots,
        **({} if trouble is None else {"memory": str(trouble).partition("\n")[0]}),
    }


def _describe_gpu(worker_group: WorkerGroup, slot: int) -> dict[str, Any] | None:
    sample = getattr(worker_group.parts.get("devices"), "latest", {}).get(slot)
    if sample is None:
        return None
    names = ("use", "memory", "memory_total", "watts", "celsius")
    return {name: getattr(sample, name) for name in names}


def _describe_memory(slot: Any, role: str) -> dict[str, int | None]:
    memory = (
        None if slot is None else next((role_memory for role_memory in slot.roles if role_memory.role == role), None)
    )
    return {"bytes": None if memory is None else memory.total, "asleep": None if memory is None else memory.asleep}
