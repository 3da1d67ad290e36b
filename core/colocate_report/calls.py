"""Count a run's calls: totals per role and method, busy spans per slot, and time lost by restarts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs

from colocate.driver import CallRecord, CheckpointRecord, MoveRecord
from colocate.errors import ColocateError
from colocate.features import CALLS
from colocate.plugins import hookimpl
from colocate_report.contention import BusySpan, Handover, Move, RoleUse, measure_contention

if TYPE_CHECKING:
    from colocate.driver import IdleTracker


@attrs.frozen
class Restart:
    """A restart of a group after a failure."""

    group: str
    what: str  # The cause in words, such as "worker 1 was killed".
    at: float  # The time of the failure, in seconds of time.time().
    ready: float  # The time when the group could be called again.
    since: float  # The time of the restored state. Work since this time is lost.

    @property
    def lost(self) -> float:
        """The seconds of lost work, plus the seconds without the group."""
        return self.ready - self.since


def describe_loss(group: str, cause: ColocateError | None) -> str:
    """Describe the cause of a group's loss in words."""
    if cause is None or cause.rank is None:
        return f"group {group} failed"
    if cause.signal == "SIGKILL":
        return f"worker {cause.rank} was killed"
    if cause.signal is not None:
        return f"worker {cause.rank} was ended by {cause.signal}"
    return f"worker {cause.rank} " + ("failed" if cause.exitcode is None else f"exited with code {cause.exitcode}")


class SleepTimes:
    """A counter of the time that each role's ranks were awake since a run's beginning."""

    def __init__(self, began: float) -> None:
        self._start = began
        self._ranks: set[tuple[str, str, int]] = set()
        self._asleep: dict[tuple[str, str, int], float] = {}  # The time when each sleeping rank fell asleep.
        self._slept: dict[tuple[str, str], float] = {}

    def add_rank(self, group: str, role: str, rank: int) -> None:
        """Register a rank of a role."""
        self._ranks.add((group, role, rank))

    def record_move(self, record: MoveRecord) -> None:
        """Record that a rank fell asleep or woke up, completely or in part."""
        rank = record.group, record.role, record.rank
        self._ranks.add(rank)
        if record.asleep:
            self._asleep.setdefault(rank, record.end)
        elif (since := self._asleep.pop(rank, None)) is not None:
            self._add_sleep(rank, record.start - since)

    def wake_group(self, group: str, now: float) -> None:
        """Record that all roles of a group are awake from now on."""
        for rank in [rank for rank in self._asleep if rank[0] == group]:
            self._add_sleep(rank, now - self._asleep.pop(rank))

    def awake_seconds(self, now: float) -> dict[tuple[str, str], float]:
        """Return the awake seconds by group and role, summed over ranks; empty if no role has slept."""
        if not self._asleep and not self._slept:
            return {}
        seconds_by_role: dict[tuple[str, str], float] = {}
        for rank in self._ranks:
            if rank[1]:
                since = self._asleep.get(rank, now)
                seconds_by_role[rank[:2]] = seconds_by_role.get(rank[:2], 0.0) + since - self._start
        return {role: seconds - self._slept.get(role, 0.0) for role, seconds in seconds_by_role.items()}

    def _add_sleep(self, rank: tuple[str, str, int], seconds: float) -> None:
        self._slept[rank[:2]] = self._slept.get(rank[:2], 0.0) + max(0.0, seconds)


K = TypeVar("K")
N = TypeVar("N", int, float)
KEPT_SPANS = 100_000  # The most spans that are stored, which are the last ones. Totals count all calls.


@attrs.frozen
class Span:
    """A time span in which one rank ran a call or moved the role's memory ("sleep", "wake")."""

    group: str
    slot: int
    role: str
    method: str
    start: float
    end: float


@attrs.frozen
class Total:
    """The number and time of one method's calls."""

    group: str
    role: str
    method: str
    calls: int
    seconds: float  # The total seconds. The slowest rank of each call counts.


@attrs.define(eq=False)
class CallLog:
    """An observer that stores totals of all calls and the time spans of the last calls."""

    _slot: Callable[[str, str, int], int]  # Returns the slot for a group's name, a role's name and a rank.
    _totals: dict[tuple[str, str, str], tuple[int, float]] = attrs.field(factory=dict, init=False)
    # Each span with the earliest possible start, and the kind of a memory move (None for a call).
    _busy: deque[tuple[Span, float, Move | None]] = attrs.field(factory=lambda: deque(maxlen=KEPT_SPANS), init=False)
    _moved: dict[tuple[str, str], tuple[int, int]] = attrs.field(factory=dict, init=False)
    _transferred: dict[tuple[str, str], int] = attrs.field(factory=dict, init=False)
    _handed_over: dict[tuple[str, str, str], int] = attrs.field(factory=dict, init=False)
    _naps: SleepTimes = attrs.field(factory=lambda: SleepTimes(time.time()), init=False)
    _saved: dict[str, float] = attrs.field(factory=dict, init=False)  # The time of each group's last checkpoint.
    _idling: IdleTracker = attrs.field(init=False)
    _lost: dict[str, Restart] = attrs.field(factory=dict, init=False)  # Restarts that aren't complete yet.
    _restarts: list[Restart] = attrs.field(factory=list, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        # Imported here, because a program that only reads records may lack this feature.
        from colocate.driver import IdleTracker

        self._idling = IdleTracker(self._slot, KEPT_SPANS)

    @hookimpl
    def colocate_call_finished(self, record: CallRecord) -> None:
        """Count a call, on the runtime's thread. Sleeps and wakes don't count, because they arrive as memory moves."""
        if CALLS.get(record.method) == "memory":
            return
        key = (record.group, record.role, record.method)
        longest = max((end - start for _, start, end in record.ran), default=0.0)
        with self._lock:
            self._idling.add_call(record)
            calls, seconds = self._totals.get(key, (0, 0.0))
            self._totals[key] = calls + 1, seconds + longest
            for rank, start, end in record.ran:
                slot = self._slot(record.group, record.role, rank)
                span = Span(record.group, slot, record.role, record.method, start, end)
                self._busy.append((span, record.ready, None))
                self._naps.add_rank(record.group, record.role, rank)
            received = sum(transfer.nbytes for transfer in record.transfers)
            _add_to(self._transferred, (record.group, record.role), received)
            for maker, nbytes in record.handed_over.items():
                _add_to(self._handed_over, (record.group, maker, record.role), nbytes)

    @hookimpl
    def colocate_group_checkpointed(self, record: CheckpointRecord) -> None:
        """Record the time of a group's checkpoint. Runs on the runtime's thread."""
        with self._lock:
            self._saved[record.group] = record.taken

    @hookimpl
    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """Record that a role fell asleep or woke up. Runs on the runtime's thread."""
        with self._lock:
            slot = self._slot(record.group, record.role, record.rank)
            span = Span(record.group, slot, record.role, record.kind, record.start, record.end)
            self._idling.add_move(record)
            self._busy.append((span, record.start, Move.IN_CALL if record.in_call else Move.ALONE))
            times, nbytes = self._moved.get((record.group, record.role), (0, 0))
            self._moved[record.group, record.role] = times + 1, nbytes + record.nbytes
            self._naps.record_move(record)

    @hookimpl
    def colocate_group_changed(self, name: str, state: str, cause: ColocateError | None) -> None:
        """Record the failure, restart or recovery of a group. New roles are awake."""
        now = time.time()
        with self._lock:
            if state == "failed":
                self._lost[name] = Restart(name, describe_loss(name, cause), now, now, self._saved.get(name, 0.0))
            elif state == "restarting":
                self._naps.wake_group(name, now)
            elif state == "ready" and (lost := self._lost.pop(name, None)) is not None:
                self._restarts.append(attrs.evolve(lost, ready=now))

    def method_totals(self) -> tuple[Total, ...]:
        """Return the totals per method, in the order of first calls."""
        with self._lock:
            return tuple(Total(*key, *counts) for key, counts in self._totals.items())

    def measure_contention(self) -> tuple[RoleUse, ...]:
        """Return the roles' use of slots, and the time that roles waited for each other, from the stored spans."""
        with self._lock:
            stretches, moved = list(self._busy), dict(self._moved)
            transferred, awake = dict(self._transferred), self._naps.awake_seconds(time.time())
        slots: dict[tuple[str, int], list[BusySpan]] = {}
        for span, ready, move in stretches:
            busy = BusySpan(span.start, span.end, span.role, ready, move)
            slots.setdefault((span.group, span.slot), []).append(busy)
        return tuple(measure_contention(slots, moved, transferred, awake))

    def idle_seconds(self, since: float, until: float) -> Mapping[str, float]:
        """Return the causes of idle slots, with the seconds of all slots; the longest comes first.

        Only the last part of a long run counts.
        """
        from colocate.driver import measure_idle

        with self._lock:
            calls, moves = self._idling.copy_records()
            slots = self._idling.list_slots()
            if len(self._busy) >= KEPT_SPANS:
                since = max(since, min((each.started_at for each in calls), default=since))
        seconds_by_cause: dict[str, float] = {}
        for each in measure_idle(calls, moves, dict.fromkeys(slots, (since, until))).values():
            for why, seconds in each.items():
                _add_to(seconds_by_cause, why, seconds)
        return dict(sorted(seconds_by_cause.items(), key=lambda each: -each[1]))

    def list_restarts(self, saved: Sequence[float]) -> tuple[Restart, ...]:
        """Return the completed restarts; `saved` has further times at which the groups' state was saved."""
        with self._lock:
            restarts = list(self._restarts)
        return tuple(
            attrs.evolve(restart, since=max([restart.since, *(when for when in saved if when <= restart.at)]))
            for restart in restarts
        )

    def list_handovers(self) -> tuple[Handover, ...]:
        """Return the results that one role made and another role used on the same slots; most bytes come first."""
        with self._lock:
            rows = [Handover(*key, nbytes) for key, nbytes in self._handed_over.items()]
        return tuple(sorted(rows, key=lambda each: -each.nbytes))

    def last_spans(self) -> tuple[Span, ...]:
        """Return the last spans, in the order in which calls ended."""
        with self._lock:
            return tuple(span for span, _, _ in self._busy)


def _add_to(counts: dict[K, N], key: K, more: N) -> None:
    if more:
        counts[key] = more + counts.get(key, 0)
