"""The driver's side of recordings: implements `runtime.record` and `comparison`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import attrs

from colocate import features
from colocate._calls.pending import PendingCall
from colocate._calls.sending import for_all, refuse_here, send_blocking
from colocate._calls.view import viewed
from colocate._protocol.message import Message
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import check_may_wait
from colocate._system.files import GrowingFile
from colocate._system.numbers import parse_bytes
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError
from colocate.features.recordings.differences import FirstDifference, MethodComparison
from colocate.features.recordings.files import STEPS, RoleFolder, RowOrder, mark_end, read_lines, to_line
from colocate.features.recordings.given import Compare, Replay
from colocate.features.recordings.joining import JoinedComparison
from colocate.features.recordings.messages import (
    COMPARISON,
    RECORDING,
    ComparedResult,
    RecordingNotice,
    RecordingOrder,
    ReplaySource,
)
from colocate.features.recordings.whole import describe_method
from colocate.features.recordings.worker import RecordingsOfWorker

_log = logging.getLogger("colocate")


class RecordingsOfGroup(GroupFeature):
    """The recording feature on the driver: tracks which roles of a group are recorded, replayed or compared."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.recorded_folders: dict[str, Path] = {}
        self.played_folders: dict[str, str] = {}
        self.comparisons: dict[
            str, JoinedComparison
        ] = {}  # The comparisons on the driver: for roles that were recorded with other ranks or meshes.
        self._life = secrets.token_hex(8)
        self._rows: dict[int, list[tuple[int, int]]] = {}  # The rank and the index of each arrived row, by call.
        self._files: dict[str, RowOrder] = {}  # The files with the order in which rows arrive, by role.

    def role_configs(self) -> Mapping[str, Sequence[ReplaySource]]:
        """Return the recordings for replays and comparisons, by role.

        Raises:
            ConfigError: A role has no recording, or the recording has another seed, or a recording to replay has
                another number of ranks.
        """
        recordings = {}
        for name, spec in self._worker_group.declared.specs.items():
            options = [option for option in (spec.replay, spec.compare) if option is not None]
            if options:
                role = self._worker_group.roles[name]
                recordings[name] = [_find_played(self._worker_group, role, option, self._life) for option in options]
                if name not in self.comparisons and recordings[name][-1].joins:
                    self.comparisons[name] = JoinedComparison(role, recordings[name][-1], self._notify_user)
        self.played_folders = {name: options[0].folder for name, options in recordings.items()}
        return recordings

    def add_recorded(self, recorded: Mapping[str, Path]) -> None:
        """Register the folders of recorded roles, and start to write the order in which rows arrive."""
        self.recorded_folders |= recorded
        self._files |= {name: RowOrder(folder) for name, folder in recorded.items()}
        if "rows" in features.FEATURES:
            cast("Any", self._worker_group.get_part("rows")).listeners = (self._on_row,)

    def remove_recorded(self, role: str) -> None:
        """Remove a role that is no longer recorded, and close its file with the order in which rows arrived."""
        self.recorded_folders.pop(role, None)
        if (file := self._files.pop(role, None)) is not None:
            file.close()

    def mark_step(self, step: int) -> None:
        """Mark the end of a step in the recordings, so that `Replay(step=...)` finds the start of the next step."""
        line = to_line({"step": step, "calls": {self._worker_group.name: self._worker_group.order.next_seq - 1}})
        for folder in {path.parent for path in self.recorded_folders.values()}:
            with contextlib.closing(GrowingFile(folder / STEPS)) as file:
                file.append_text(line)

    def _on_row(self, call: Any, slot: int, row: int) -> None:
        if call.role not in self._files:
            return
        if call.seq not in self._rows:
            self._rows[call.seq] = []
            call._add_callback(self._on_rows_ended)
        self._rows[call.seq].append((call.rank_of(slot), row))

    def _on_rows_ended(self, call: Any) -> None:
        rows, file = self._rows.pop(call.seq, []), self._files.get(call.role)
        if file is not None:
            file.add_call(call.seq, rows=rows)

    def on_call_report(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Write down which rank got which rows of a call, if the driver has chosen that."""
        file = self._files.get(call.role)
        if file is None or call.partition is None or slot != call.targets[0]:
            return
        file.add_call(call.seq, partition=[[*map(int, rows)] for rows in call.partition])

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Show a notice from a worker to the user, or compare a result that a worker has sent."""
        if isinstance(message, RecordingNotice):
            self._notify_user(message.text)
            return
        assert isinstance(message, ComparedResult)
        order = self._worker_group.order
        with order.lock:
            call = order.pending.get(message.seq)
            if call is not None and call.role in self.comparisons:  # Ignore results of an earlier driver's calls.
                self.comparisons[call.role].on_document(call, call.rank_of(worker.slot), body)

    def on_restarted(self) -> None:
        """Stop recordings after a restart, because new workers repeat calls that were recorded before."""
        if self.recorded_folders:
            self._notify_user(
                f"it has been restarted, with which the recording of {', '.join(self.recorded_folders)} has ended"
            )
            for role, folder in [*self.recorded_folders.items()]:
                mark_end(folder, "its group was restarted")
                self.remove_recorded(role)
        self.load_state(None)

    def load_state(self, saved: Any) -> None:
        """Restart comparisons after a restore, because calls after the checkpoint may be repeated."""
        for joining in self.comparisons.values():  # Ended calls are compared before the comparison restarts.
            self._worker_group.services.timers.call_soon(joining.restart_comparison)

    def finish_background(self, grace: float) -> Sequence[BaseException]:
        """Stop all comparisons on the driver."""
        for joining in self.comparisons.values():
            joining.close()
        return ()

    def role_attributes(self, role: str) -> Mapping[str, str]:
        """Return the folders of a role that is recorded, replayed or compared, to be shown to users."""
        shown = {"recorded": str(self.recorded_folders[role])} if role in self.recorded_folders else {}
        if role in self.played_folders:
            is_replayed = self._worker_group.declared.specs[role].replay is not None
            shown["replayed" if is_replayed else "compared"] = self.played_folders[role]
        return shown

    def _notify_user(self, text: str) -> None:
        words = f"group {self._worker_group.name!r}, {text}"
        self._worker_group.services.printer.call_soon(lambda: _log.warning("%s", words))


class Recorder:
    """A running recording of roles, returned by `Runtime.record`. As a context manager it stops at the block's end.

    Attributes:
        folder: The recording's folder.
    """

    def __init__(self, folder: Path, groups: Mapping[str, tuple[WorkerGroup, Sequence[RoleInfo]]]) -> None:
        """Create a recorder. Users call `Runtime.record` instead."""
        self.folder = folder
        self._groups = groups

    def close(self) -> None:
        """Stop recording, and wait until all files are written."""
        for call in self._stop_recording():
            with suppress(ColocateError):  # Workers of a failed group have written as much as possible.
                call.result()

    def _stop_recording(self) -> list[PendingCall]:
        """Stop recording, and return calls that end as soon as all files are written."""
        groups, self._groups = self._groups, {}
        calls = []
        for worker_group, roles in groups.values():
            part = get_recordings(worker_group)
            if worker_group.alive and any(role.name in part.recorded_folders for role in roles):
                with suppress(ColocateError):  # The group may have failed.
                    ends = tuple(RecordingOrder(role.name, None) for role in roles)
                    calls.append(_send_call(worker_group, RECORDING, recorded=ends))
            for role in roles:
                part.remove_recorded(role.name)
        return calls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # Don't wait for the files, because a call may never end after an error.
            self._stop_recording()


def record(views: Any, folder: str | os.PathLike[str], limit: str | int | None, inputs: Any, services: Any) -> Recorder:
    """Record the results of roles; see `Runtime.record`."""
    check_may_wait("runtime.record")
    most = None if limit is None else parse_bytes(limit, "runtime.record(limit)")
    place = Path(os.path.abspath(folder))
    groups: dict[str, tuple[WorkerGroup, list[RoleInfo]]] = {}
    with_inputs = {(worker_group.name, role.name) for worker_group, role in _resolve_views(inputs)}
    for worker_group, role in _resolve_views(views):
        if worker_group.services is not services:
            raise ConfigError(f"runtime.record: role {role.name!r} is of another runtime")
        if (where := get_recordings(worker_group).recorded_folders.get(role.name)) is not None:
            raise ConfigError(f"runtime.record: role {role.name!r} is recorded already, in {where}")
        groups.setdefault(worker_group.name, (worker_group, []))[1].append(role)
    if not groups:
        raise ConfigError("runtime.record: name at least one view")
    if unrecorded := with_inputs - {(name, role.name) for name, (_, roles) in groups.items() for role in roles}:
        raise ConfigError(
            f"runtime.record(inputs): role {min(unrecorded)[1]!r} isn't among the roles that are recorded"
        )
    for worker_group, _ in groups.values():
        refuse_here(worker_group, "runtime.record")
    whole = Recorder(place, groups)
    paths: list[Path] = []
    try:
        recorded = {
            name: [
                _create_recording(place, worker_group, role, paths, most, (name, role.name) in with_inputs)
                for role in roles
            ]
            for name, (worker_group, roles) in groups.items()
        }
        for name, (worker_group, _) in groups.items():
            get_recordings(worker_group).add_recorded(
                {recorded_role.role: Path(str(recorded_role.folder)) for recorded_role in recorded[name]}
            )
            # Prepare all ranks before the recording begins, because a call could arrive before a rank is ready.
            _announce_recorded(
                worker_group, [attrs.evolve(recorded_role, begins=False) for recorded_role in recorded[name]]
            )
            _announce_recorded(worker_group, recorded[name])
    except Exception:  # If one role can't be recorded, no role is recorded.
        whole.close()
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        raise
    except BaseException:  # After an interrupt, don't wait for the workers.
        whole._stop_recording()
        raise
    return whole


def get_recordings(worker_group: WorkerGroup) -> RecordingsOfGroup:
    """Return a group's recording feature on the driver."""
    return cast("RecordingsOfGroup", worker_group.get_part("recordings"))


def _resolve_views(views: Any) -> Iterator[tuple[WorkerGroup, RoleInfo]]:
    for view in views if isinstance(views, Iterable) and not isinstance(views, str) else [views]:
        yield viewed(view, "runtime.record(view")


def _create_recording(
    place: Path, worker_group: WorkerGroup, role: RoleInfo, made: list[Path], limit: int | None, inputs: bool
) -> RecordingOrder:
    path = place / f"{worker_group.name}.{role.name}"
    cls = f"{role.cls.__module__}:{role.cls.__qualname__}"
    RoleFolder(
        path,
        worker_group.name,
        role.name,
        cls,
        len(role.slots),
        worker_group.services.seed,
        {name: describe_method(spec) for name, spec in role.methods.items()},
        _meshes(role),
    ).create_folder()
    made.append(path)
    return RecordingOrder(role.name, str(path), limit, inputs, begins=True)


def _announce_recorded(worker_group: WorkerGroup, recorded: Sequence[RecordingOrder]) -> None:
    _call_workers(worker_group, RECORDING, recorded=tuple(recorded))


def _call_workers(worker_group: WorkerGroup, said: str, **arguments: Any) -> Any:
    return _send_call(worker_group, said, **arguments).result()


def _send_call(worker_group: WorkerGroup, said: str, **arguments: Any) -> PendingCall:
    return send_blocking(for_all(worker_group, said, said, RecordingsOfWorker.calls[said], arguments))


def _find_played(worker_group: WorkerGroup, role: RoleInfo, given: Replay | Compare, life: str) -> ReplaySource:
    """Check the recording for a role's replay or comparison, and return the instruction for the workers.

    Raises:
        ConfigError: The recording is missing or has another seed, or a recording to replay has other ranks.
    """
    role_folder = RoleFolder.find(given.folder, worker_group.name, role.name)
    problem = f"role {role.name!r}: the recording in {given.folder} is of"
    if role_folder.ranks != len(role.slots) and isinstance(given, Replay):
        raise ConfigError(
            f"{problem} {role_folder.ranks} ranks, and the role has {len(role.slots)}: give it as many slots"
        )
    seed = worker_group.services.seed
    if role_folder.seed != seed and not (isinstance(given, Replay) and given.loose):
        raise ConfigError(
            f"{problem} the seed {role_folder.seed}, and the runtime has {seed}: other roles would draw otherwise"
        )
    after = 0 if given.step is None else _last_call_before(role_folder, given.step)
    if isinstance(given, Replay):
        return ReplaySource(str(role_folder.path), True, loose=given.loose, after=after, life=life)
    joins = role_folder.ranks != len(role.slots) or json.dumps(role_folder.meshes) != json.dumps(_meshes(role))
    return ReplaySource(str(role_folder.path), False, tolerance=given.tolerance, after=after, joins=joins, life=life)


def _meshes(role: RoleInfo) -> dict[str, dict[str, int]]:
    return {name: mesh.shape for name, mesh in role.meshes.items()}


def _last_call_before(found: RoleFolder, step: int) -> int:
    steps = read_lines(found.path.parent / STEPS, _check_step)
    if not any(entry["step"] == step for entry in steps):
        has = f"{steps[0]['step']} to {steps[-1]['step']}" if steps else "none"
        raise ConfigError(f"the recording in {found.path.parent} has no step {step}: it has {has}")
    earlier = [entry["calls"].get(found.group, 0) for entry in steps if entry["step"] < step]
    return max(earlier, default=0)


def _check_step(told: Mapping[str, Any]) -> None:
    if not all(type(number) is int for number in (told["step"], *told["calls"].values())):
        raise ValueError("its step or its calls are no numbers")


@attrs.frozen
class ComparedMethod:
    """The result of comparing a method's calls with recorded calls.

    Attributes:
        method: The method.
        calls: The number of ended calls, summed over ranks; with another number of ranks than recorded each counts
            once.
        differ: The number of these calls, or of their rows, with another result.
        numbers: The number of compared numbers, texts and other parts.
        different: The number of differing parts.
        absolute: The largest absolute difference of numbers, including differences within the tolerance.
        relative: The largest difference relative to the recorded number.
        arguments: The number of calls, or rows, with other arguments.
        missing: The number of calls, or rows, that weren't recorded, or can't be compared over another number of ranks.
        left: The number of recorded calls that haven't been made yet.
        first: A text about the first difference, or why a call can't be compared; None without either.
        origin: The first differing call, and the parameter if an argument differs; None for none. Of all compared roles
            of a group, start to look at the origin with the lowest `seq`.
    """

    method: str
    calls: int
    differ: int
    numbers: int
    different: int
    absolute: float
    relative: float
    arguments: int
    missing: int
    left: int
    first: str | None
    origin: FirstDifference | None


def comparison(view: Any) -> list[ComparedMethod]:
    """Return the results so far of a role's comparison with a recording (`role(...).on(compare=...)`), by method.

    Raises:
        ConfigError: The view is no view, or the role isn't compared.
    """
    worker_group, role = viewed(view, "comparison(view")
    if worker_group.declared.specs[role.name].compare is None:
        raise ConfigError(f"comparison: role {role.name!r} isn't compared: declare it with .on(compare=...)")
    check_may_wait("comparison")
    worker_group.check_usable()
    by_method: dict[str, list[MethodComparison]] = {}
    results = _call_workers(worker_group, COMPARISON, role=role.name)
    if (joining := get_recordings(worker_group).comparisons.get(role.name)) is not None:
        worker_group.services.timers.run(lambda: None)  # Wait until the results of ended calls are handled.
        results = [joining.table()]
    for methods in results:
        for name, compared in (methods or {}).items():
            by_method.setdefault(name, []).append(compared)
    return [_join_results(name, ranks) for name, ranks in by_method.items()]


def _join_results(method: str, ranks: Sequence[MethodComparison]) -> ComparedMethod:
    sums = {name: sum(getattr(each, name) for each in ranks) for name in ("calls", "differ", "numbers", "different")}
    most = {name: max(getattr(each, name) for each in ranks) for name in ("absolute", "relative")}
    more = {name: sum(getattr(each, name) for each in ranks) for name in ("arguments", "missing", "left")}
    first = next((each.first for each in ranks if each.first), None)
    origins = [each.origin for each in ranks if each.origin is not None]
    origin = min(origins, key=lambda each: each.seq, default=None)
    return ComparedMethod(method, **sums, **most, **more, first=first, origin=origin)
