"""`colocate.profile`: runs torch's profiler on ranks, and merges the traces with the driver's records of calls."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs

from colocate._api.connection import Connection
from colocate._api.group import ColocatedGroup
from colocate._api.runtime import Runtime
from colocate._calls.pending import PendingCall
from colocate._calls.records import CallRecord, MoveRecord
from colocate._calls.sending import for_all, refuse_here, send_blocking
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._signals.in_framework import check_may_wait
from colocate._system.deadline import Deadline
from colocate._system.nearest import did_you_mean
from colocate._system.recent import Interval
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import CapabilityError, ColocateError, ConfigError
from colocate.features import CALLS
from colocate.features.looking.idle import CallHistory, Slot, TimedCall, call_label
from colocate.features.profiling.messages import BEGIN, END, AskClock, Clock, Meeting, RankProfile
from colocate.features.profiling.parts import Part, Piece, format_rows, split_time
from colocate.features.profiling.worker import ProfilingOfWorker

_LOOKS = 7
"""The number of attempts to read a worker's clock, of which the fastest counts."""
_CLOCKS_WITHIN_S = 30.0
_MOST_RECORDS = 200_000
SAMPLERS = ("torch", "py-spy")


class ProfilingOfGroup(GroupFeature):
    """The driver's half of a group's profiles: measures how far workers' clocks differ from the driver's clock."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._requests: Requests[int, tuple[float, float]] = Requests(worker_group.base)

    def on_restarted(self) -> None:
        """Drop pending requests after a restart, because the former workers have exited."""
        self._requests = Requests(self._worker_group.base)

    def on_failed(self, error: ColocateError) -> None:
        """Fail all pending requests with the group's error."""
        self._requests.fail_all(error)

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Record a worker's time, together with the driver's time of receipt."""
        assert isinstance(message, Clock)
        self._requests.add_answer(message.token, worker.slot, (message.now, time.time()))

    def clock_offsets(self, within_s: float) -> dict[int, float]:
        """Return, by slot, how many seconds each worker's clock is ahead of the driver's clock.

        The offset is 0 if it is within the error of the measurement (half the round trip), as on one machine.

        Raises:
            ColocateError: The group has failed.
            TimeoutError: A worker doesn't answer.
        """
        deadline, best = Deadline(within_s), dict[int, tuple[float, float]]()
        for _ in range(_LOOKS):
            tell, asked = self._worker_group.make_sender(), dict[int, float]()

            def ask(slot: int, token: int, tell: Any = tell, asked: dict[int, float] = asked) -> None:
                asked[slot] = time.time()
                tell(slot, AskClock(token))

            slots = self._worker_group.live_slots()
            answers = self._requests.ask(slots, ask, deadline, lambda who: f"worker {who} doesn't tell its time")
            for slot, (worker_time, received_at) in zip(slots, answers, strict=True):
                error, offset = (received_at - asked[slot]) / 2, worker_time - (asked[slot] + received_at) / 2
                if slot not in best or error < best[slot][0]:
                    best[slot] = error, offset
        return {slot: 0.0 if abs(offset) <= error else offset for slot, (error, offset) in best.items()}


@attrs.define(eq=False)
class _EventLog:
    calls: deque[CallRecord] = attrs.field(factory=lambda: deque(maxlen=_MOST_RECORDS))
    moves: deque[MoveRecord] = attrs.field(factory=lambda: deque(maxlen=_MOST_RECORDS))

    def colocate_call_finished(self, record: CallRecord) -> None:
        self.calls.append(record)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        self.moves.append(record)


@attrs.define(eq=False, repr=False)
class Profile:
    """The result of `colocate.profile`, which is complete when the block has ended.

    Attributes:
        trace: The file for Perfetto (ui.perfetto.dev) or chrome://tracing: colocate's calls, with the events of torch's
            profiler for each rank.
        snapshots: The files with snapshots of memory, for https://pytorch.org/memory_viz.
        seconds: The length of the profile.
        slots: The profiled slots, by group.
        parts: The time of these slots, split by role and method.
        untraced: Slots, by group and number, in whose process torch isn't imported, so that only calls are known.
    """

    trace: Path
    slots: Mapping[str, Sequence[int]]
    snapshots: Sequence[Path] = ()
    seconds: float = 0.0
    parts: Mapping[str, Part] = attrs.field(factory=dict)
    untraced: Sequence[Slot] = ()

    def __repr__(self) -> str:
        return f"<profile of {self.seconds:.3f} s in {self.trace}>"

    def rows(self) -> list[dict[str, str | float]]:
        """Return a table of `parts` with the average seconds per slot. The last row is the sum, equal to `seconds`."""
        return format_rows(self.parts, max(1, sum(map(len, self.slots.values()))))


@contextlib.contextmanager
def profile(
    group: ColocatedGroup | Sequence[ColocatedGroup],
    *,
    roles: str | Collection[str] | None = None,
    ranks: int | Collection[int] | None = None,
    memory: bool = False,
    sampler: str = "torch",
    title: str = "Profile",
) -> Iterator[Profile]:
    """Profile ranks while the block runs, by torch's profiler in the workers and by the driver's own records.

    The profile begins and ends between calls, by calls on all workers of the group. The block writes `profile.json`
    into the run's folder (of `colocate.record` or a job), else into the working folder. Reports show the table.

    Args:
        group: The group of the ranks; or several groups of one runtime.
        roles: The roles whose ranks are profiled, on their whole workers; None for all workers.
        ranks: Ranks of these roles; None for all ranks.
        memory: Whether each rank with a GPU also leaves a snapshot of its memory, with the history of allocations.
        sampler: "torch", or "py-spy" for code that isn't torch's: Python stacks, a hundred times a second.
        title: The title of the table in the report.

    Raises:
        ConfigError: There is no such role or rank, or no rank has a GPU for `memory`.
        CapabilityError: The workers are threads of this process, and torch only profiles whole processes.
        ColocateError: A profile of the group is running already, or the profiler of a rank can't begin or end, for
            example because another profiler of torch's runs in that process.
    """
    groups = [group] if isinstance(group, ColocatedGroup) else list(group)
    session = _Session(groups, _select_slots(groups, roles, ranks), memory, sampler)
    try:
        session.start_profile()
        yield session.profile
        session.finish_profile(title)
    except BaseException:
        session.discard_profile()
        raise


def check_profile(groups: Sequence[Any], roles: Any, ranks: Any, memory: bool, sampler: str) -> None:
    """Check the arguments of a profile. Raises the same errors as `profile`."""
    _Session(groups, _select_slots(groups, roles, ranks), memory, sampler)


def _select_slots(groups: Sequence[Any], roles: Any, ranks: Any) -> dict[str, tuple[int, ...]]:
    for item in groups:
        if not isinstance(item, ColocatedGroup):
            raise ConfigError(f"colocate.profile(group): it is a group, not {item!r}")
    named = None if roles is None else [roles] if isinstance(roles, str) else [*roles]
    numbers = None if ranks is None else [ranks] if isinstance(ranks, int) else [*ranks]
    role_infos = {name: info for item in groups for name, info in item._node.roles.items()}
    for name in named or ():
        if name not in role_infos:
            names = ", ".join(role_infos)
            raise ConfigError(
                f"colocate.profile(roles): there is no role {name!r}: {names}{did_you_mean(name, role_infos)}"
            )
        if missing := [item for item in numbers or () if item not in range(len(role_infos[name].slots))]:
            raise ConfigError(
                f"colocate.profile(ranks): role {name!r} has {len(role_infos[name].slots)}, no rank {missing[0]}"
            )
    targets: dict[str, tuple[int, ...]] = {}
    for item in groups:
        node: WorkerGroup = item._node
        infos = [info.slots for name, info in node.roles.items() if named is None or name in named]
        slots = {
            slot for role_slots in infos for rank, slot in enumerate(role_slots) if numbers is None or rank in numbers
        }
        if slots:
            targets[node.name] = tuple(sorted(slots))
    if not targets:
        raise ConfigError("colocate.profile: this leaves no rank to profile")
    return targets


class _Session:
    def __init__(
        self, groups: Sequence[ColocatedGroup], slots: Mapping[str, tuple[int, ...]], memory: bool, sampler: str
    ) -> None:
        if sampler not in SAMPLERS:
            raise ConfigError(f"colocate.profile(sampler={sampler!r}): it is {' or '.join(map(repr, SAMPLERS))}")
        if memory and sampler != "torch":
            raise ConfigError("colocate.profile(memory=True): only torch's profiler has snapshots of memory")
        self._groups = {group.name: group._node for group in groups if group.name in slots}
        self._memory, self._sampler = memory, sampler
        first = next(iter(self._groups.values()))
        connection: Any = first
        while not isinstance(connection, Connection):
            connection = connection.owner
        self._connection = connection
        for node in self._groups.values():
            self._check_slots(node, slots[node.name])
        if memory and not any(
            worker.boot.device != "cpu" and worker.slot in slots[node.name]
            for node in self._groups.values()
            for worker in node.workforce.workers
        ):
            raise ConfigError("colocate.profile(memory=True): none of these ranks has a GPU, whose memory that shows")
        run = first.services.run
        self._folder = (Path.cwd() if run is None else Path(run.directory)) / "profile"
        self.profile = Profile(self._folder.with_suffix(".json"), slots)
        self._has_folder = False  # Whether this session has created the folder.
        self._event_log = _EventLog()
        self._begin_calls: dict[str, PendingCall] = {}
        self._end_calls: dict[str, PendingCall] = {}
        self._clock_offsets: dict[Slot, float] = {}
        self._start_time = time.time()
        self._token = uuid.uuid4().hex
        self._timeline: Any = None

    def _check_slots(self, node: WorkerGroup, slots: Sequence[int]) -> None:
        label = f"a profile of group {node.name!r}"
        if node.services.executor.in_process:
            raise CapabilityError(
                f"{label}: its workers are threads of this process, and torch profiles a process, not one rank of it. "
                "Use connect(processes=True) (--set executor.with.processes=true), Ray or Dask"
            )
        refuse_here(node, label)
        check_may_wait(label)

    def start_profile(self) -> None:
        for node in list(self._connection.worker_groups.values()):
            if node.alive:
                # Groups outside the profile may hang or have failed, so their errors are ignored.
                is_other = node.name not in self._groups
                within_s, errors = (1.0, (ColocateError, TimeoutError)) if is_other else (_CLOCKS_WITHIN_S, ())
                with contextlib.suppress(*errors):
                    measure_offsets = partial(
                        cast("ProfilingOfGroup", node.get_part("profiling")).clock_offsets, within_s
                    )
                    self._clock_offsets |= {(node.name, slot): seconds for slot, seconds in measure_offsets().items()}
        self._make_folder()
        runtime: Runtime = Runtime._wrap(self._connection)
        runtime.observe(self._event_log)
        self._timeline = runtime._trace(
            self._folder / "timeline.part", self._clock_offsets, self._start_time, (BEGIN, END)
        )
        for name, node in self._groups.items():
            parameters = {"token": self._token, "slots": self.profile.slots[name], "memory": self._memory}
            parameters["folder"] = "" if self._sampler == "torch" else str(self._folder.absolute())
            self._begin_calls[name] = _submit_call(node, BEGIN, parameters)
            _check_answers(self._begin_calls[name].result())

    def _make_folder(self) -> None:
        for number in itertools.count(1):
            self._folder = self._folder.with_name(f"profile{'' if number == 1 else f'-{number}'}")
            self.profile.trace = self._folder.with_suffix(".json")
            try:
                self._folder.mkdir(parents=True)
            except FileExistsError:  # Another thread or process may have created the folder just now.
                continue
            if not self.profile.trace.exists():
                self._has_folder = True
                return
            self._folder.rmdir()

    def discard_profile(self) -> None:
        """Stop the profile without results, and without waiting for ranks, because one may never answer."""
        for node in self._groups.values():
            with contextlib.suppress(ColocateError):  # Ignore this error, because the block's own error is raised.
                _submit_call(node, END, {"token": self._token, "folder": "", "places": (), "ahead": (), "zero": 0.0})
        self._stop_workers()
        if self._has_folder:
            with contextlib.suppress(OSError):
                # Rename the folder first, because a file that a rank still writes there would make the removal fail.
                shutil.rmtree(self._folder.rename(self._folder.with_name(f".{self._token}")), ignore_errors=True)

    def _stop_workers(self) -> None:
        if self._event_log in self._connection.services.observers:
            self._connection.services.observers.remove(self._event_log)
        if self._timeline is not None:
            self._timeline.close()

    def finish_profile(self, title: str) -> None:
        profile, counter = self.profile, itertools.count()
        results: dict[Slot, RankProfile] = {}
        for name, node in self._groups.items():
            places = [(-1, 0, 0, 0, 0)] * node.size
            for slot in profile.slots[name]:
                places[slot] = next(counter), *self._timeline.below(name, slot)
            offsets = [self._clock_offsets.get((name, slot), 0.0) for slot in range(node.size)]
            parameters = {"places": places, "ahead": offsets, "zero": self._start_time}
            parameters |= {"token": self._token, "folder": str(self._folder.absolute())}
            self._end_calls[name] = _submit_call(node, END, parameters)
            answers: list[RankProfile | None] = _check_answers(self._end_calls[name].result())
            results |= {(name, slot): result for slot, result in enumerate(answers) if result is not None}
            if sum(group == name for group, _ in results) < len(profile.slots[name]):
                raise ColocateError(f"workers of group {name!r} are others than when its profile began: it is lost")
        self._connection.services.flush_observers()
        self._stop_workers()
        profile.seconds, profile.parts = self._compute_parts(results)
        profile.untraced = tuple(slot for slot, result in results.items() if not result.traced)
        self._merge_parts()
        if (run := self._connection.services.run) is not None:
            run.show(title, profile.rows())

    def _compute_parts(self, found: Mapping[Slot, RankProfile]) -> tuple[float, dict[str, Part]]:
        calls, transfers = list[TimedCall](), dict[Slot, list[Piece]]()
        for record in list(self._event_log.calls):
            ran = {}
            for rank, begin, end in record.ran:
                slot = record.group, self._connection.find_slot(record.group, record.role, rank)
                offset = self._clock_offsets.get(slot, 0.0)
                ran[slot] = begin - offset, end - offset
            if record.method in (BEGIN, END) and not record.role:
                continue
            calls.append(TimedCall(call_label(record.role, record.method), record.submitted, record.ready, ran))
            if not record.role and CALLS.get(record.method) == "weights":  # The whole call is a sync of weights.
                for slot, (begin, end) in ran.items():
                    transfers.setdefault(slot, []).append(Piece(begin, end, begin))
            for item in record.transfers:
                slot = record.group, self._connection.find_slot(record.group, record.role, item.rank)
                if slot in ran:
                    offset = self._clock_offsets.get(slot, 0.0)
                    piece = Piece(ran[slot][0], item.end - offset, item.start - offset)
                    transfers.setdefault(slot, []).append(piece)
        moves = []
        for move in list(self._event_log.moves):
            slot = move.group, self._connection.find_slot(move.group, move.role, move.rank)
            offset = self._clock_offsets.get(slot, 0.0)
            moves.append((slot, (move.start - offset, move.end - offset)))
        since = max(end for slot, (_, end) in self._call_spans(self._begin_calls).items() if slot in found)
        until = min(begin for slot, (begin, _) in self._call_spans(self._end_calls).items() if slot in found)
        met: dict[tuple[str, Meeting], list[float]] = {}
        for (group, _), result in found.items():
            for meeting, when in result.arrived.items():
                met.setdefault((group, meeting), []).append(when)
        last = {meeting: max(times) for meeting, times in met.items() if len(times) > 1}
        pieces = {
            slot: sorted(
                [
                    *(Piece(begin, end, last.get((slot[0], meeting), begin)) for meeting, begin, end in item.waits),
                    *transfers.get(slot, ()),
                ],
                key=lambda piece: piece.start,
            )
            for slot, item in found.items()
        }
        return until - since, split_time(CallHistory(calls, moves), pieces, (since, until))

    def _call_spans(self, calls: Mapping[str, PendingCall]) -> dict[Slot, Interval]:
        """Return, by slot, when each call that begins or ends the profile ran, in seconds of the driver's clock."""
        spans = {}
        for name, call in calls.items():
            for index, begin, end in call.spans:
                slot = name, call.targets[index]
                spans[slot] = begin - self._clock_offsets.get(slot, 0.0), end - self._clock_offsets.get(slot, 0.0)
        return spans

    def _merge_parts(self) -> None:
        profile = self.profile
        merged = self._folder / "merged"
        with merged.open("wb") as target:
            timeline = (self._folder / "timeline.part").read_bytes().rstrip()
            target.write(timeline.removesuffix(b"]").rstrip())
            for part in sorted(self._folder.glob("*.part")):
                if part.name != "timeline.part":
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
            target.write(b"\n]\n")
        merged.rename(profile.trace)
        snapshots = []
        for path in sorted(self._folder.glob("memory-*.pickle")):
            snapshots.append(path.rename(profile.trace.with_name(f"{profile.trace.stem}-{path.name}")))
        profile.snapshots = snapshots
        shutil.rmtree(self._folder)


def _check_answers(told: list[Any]) -> list[Any]:
    for answer in told:
        if isinstance(answer, str):
            raise ColocateError(answer)
    return told


def _submit_call(node: WorkerGroup, what: str, given: Mapping[str, Any]) -> PendingCall:
    return send_blocking(for_all(node, what, what, ProfilingOfWorker.calls[what], given))
