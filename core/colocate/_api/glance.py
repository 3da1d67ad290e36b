"""What the groups of a runtime do just now, for who looks from outside: `colocate top`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from colocate._api.connection import Connection
from colocate._api.memory import SlotMemory, memory_of_each
from colocate._calls.records import CallRecord, MoveRecord
from colocate._crew.crew import Crew
from colocate._system.deadline import Deadline
from colocate._system.recent import RecentSpans

_LEDGERS_WITHIN_S = 1.0


class Recent(RecentSpans[tuple[str, str, int]]):
    """An observer that knows how long each role has run on each slot in the last seconds: by group, role and rank."""

    def colocate_call_finished(self, record: CallRecord) -> None:
        """A call has ended."""
        for rank, start, end in record.ran:
            self.add((record.group, record.role, rank), start, end)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """A sleep or a wake is busy, too."""
        self.add((record.group, record.role, record.rank), record.start, record.end)


def glance(connection: Connection, recent: Recent) -> list[dict[str, Any]]:
    """The groups of a runtime, as plain data: what each slot runs, what waits there, and what its roles hold."""
    now, crews = time.time(), list(connection.crews.values())
    shares = recent.shares(now, [each for crew in crews for each in _running(crew, recent)])
    return [_group(crew, shares) for crew in crews]


def _running(crew: Crew, recent: Recent) -> Iterator[tuple[tuple[str, str, int], float]]:
    """What each slot runs, and since when: it can't have begun before the one ahead of it had ended there."""
    first: dict[int, Any] = {}
    ends = recent.ends()
    for call in list(crew.order.pending.values()):
        for slot in call.missing():
            first.setdefault(slot, call)
    for slot, call in first.items():
        ranks = {name: info.slots.index(slot) for name, info in crew.roles.items() if slot in info.slots}
        if call.role in ranks:
            ended = (ends.get((crew.name, name, rank), 0.0) for name, rank in ranks.items())
            yield (crew.name, call.role, ranks[call.role]), max(call.submitted, *ended)


def _group(crew: Crew, shares: Mapping[tuple[str, str, int], float]) -> dict[str, Any]:
    # One that is starting, or hangs, doesn't answer: the rest is of use all the same.
    held, trouble = memory_of_each(crew, Deadline(_LEDGERS_WITHIN_S))
    waiting: dict[int, list[Any]] = {worker.slot: [] for worker in crew.workforce.workers}
    for call in list(crew.order.pending.values()):
        for slot in call.missing():
            waiting[slot].append(call)
    now = time.time()  # calls were made while the workers looked
    slots = []
    for worker in crew.workforce.workers:
        calls = waiting[worker.slot]
        roles = [
            {
                "role": name,
                "rank": (rank := info.slots.index(worker.slot)),
                "busy": round(shares.get((crew.name, name, rank), 0.0), 4),
                **_held(held.get(worker.slot), name),
            }
            for name, info in crew.roles.items()
            if worker.slot in info.slots
        ]
        slots.append(
            {
                "slot": worker.slot,
                "node": worker.boot.node,
                "device": worker.boot.device,
                "pid": worker.pid,
                "queue": max(0, len(calls) - 1),
                "call": calls[0].label if calls else None,
                "age": round(now - calls[0].submitted, 3) if calls else None,
                "roles": roles,
            }
        )
    told = {"group": crew.name, "state": crew.life.state.value, "generation": crew.generation, "slots": slots}
    return told if trouble is None else {**told, "memory": str(trouble).partition("\n")[0]}


def _held(slot: SlotMemory | None, role: str) -> dict[str, int | None]:
    found = None if slot is None else next((each for each in slot.roles if each.role == role), None)
    return {"bytes": None if found is None else found.total, "asleep": None if found is None else found.asleep}
