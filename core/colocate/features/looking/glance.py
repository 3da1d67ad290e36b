"""What the groups of a runtime do just now, for who looks from outside: `colocate top`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from colocate._api.connection import Connection
from colocate._calls.pending import PendingCall
from colocate._calls.records import CallRecord, MoveRecord
from colocate._system.deadline import Deadline
from colocate._system.recent import RecentSpans
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import CapabilityError

_LEDGERS_WITHIN_S = 1.0


class Recent(RecentSpans[tuple[str, str, int]]):
    """An observer that knows how long each role has run on each slot in the last seconds: by group, role and rank."""

    def colocate_call_finished(self, record: CallRecord) -> None:
        """A call has ended."""
        for rank, start, end in record.ran:
            self.add((record.group, record.role, rank), start, end)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """A sleep or a wake is busy, too, but for one that is a part of a call."""
        if not record.in_call:
            self.add((record.group, record.role, record.rank), record.start, record.end)


def glance(connection: Connection, recent: Recent) -> list[dict[str, Any]]:
    """The groups of a runtime, as plain data: what each slot runs, what waits there, and what its roles hold."""
    now, worker_groups = time.time(), list(connection.worker_groups.values())
    more = [
        ((worker_group.name, call.role, worker_group.roles[call.role].slots.index(slot)), start, end)
        for worker_group in worker_groups
        for call, slot, start, end in (
            *_done(worker_group),
            *((call, slot, since, now) for slot, (call, since) in _running(worker_group, recent).items()),
        )
        if call.role in worker_group.roles
    ]
    shares = recent.shares(now, more)
    return [_group(worker_group, shares, recent) for worker_group in worker_groups]


def _running(worker_group: WorkerGroup, recent: Recent) -> dict[int, tuple[PendingCall, float]]:
    """Return what each slot runs, and since when: it can't have begun before the one ahead of it had ended there."""
    first: dict[int, PendingCall] = {}
    ends, done = recent.ends(), {slot: end for _, slot, _, end in _done(worker_group)}  # in order: the last one remains
    for call in list(worker_group.order.pending.values()):
        for slot in call.missing():
            first.setdefault(slot, call)
    found = {}
    for slot, call in first.items():
        ranks = {name: info.slots.index(slot) for name, info in worker_group.roles.items() if slot in info.slots}
        ranks[""] = slot  # of functions, which run on all slots
        ended = (ends.get((worker_group.name, name, rank), 0.0) for name, rank in ranks.items())
        found[slot] = call, max(call.submitted, done.get(slot, 0.0), *ended)
    return found


def _done(worker_group: WorkerGroup) -> list[tuple[PendingCall, int, float, float]]:
    """Return what slots have run of calls that others of their slots run yet: observers aren't told of these so far."""
    calls = list(worker_group.order.pending.values())
    return [(call, call.targets[index], start, end) for call in calls for index, start, end in list(call.spans)]


def _group(worker_group: WorkerGroup, shares: Mapping[tuple[str, str, int], float], recent: Recent) -> dict[str, Any]:
    # One that is starting, or hangs, doesn't answer: the rest is of use all the same.
    try:
        held, trouble = cast("Any", worker_group.part("memory")).asked_each(Deadline(_LEDGERS_WITHIN_S))
    except CapabilityError as error:
        held, trouble = {}, error
    waiting = Counter(slot for call in list(worker_group.order.pending.values()) for slot in call.missing())
    now, running = time.time(), _running(worker_group, recent)  # calls were made while the workers looked
    slots = []
    for worker in worker_group.workforce.workers:
        call, since = running.get(worker.slot, (None, now))
        roles = [
            {
                "role": name,
                "rank": (rank := info.slots.index(worker.slot)),
                "busy": round(shares.get((worker_group.name, name, rank), 0.0), 4),
                **_held(held.get(worker.slot), name),
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


def _held(slot: Any, role: str) -> dict[str, int | None]:
    found = None if slot is None else next((each for each in slot.roles if each.role == role), None)
    return {"bytes": None if found is None else found.total, "asleep": None if found is None else found.asleep}
