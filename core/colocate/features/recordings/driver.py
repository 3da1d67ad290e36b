"""`runtime.record`: what calls of roles give is written into a folder, from one call in their group's order on."""

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
from colocate._calls.sending import for_all, refuse_here, start
from colocate._calls.view import viewed
from colocate._protocol.message import Message
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.files import GrowingFile
from colocate._system.numbers import parse_bytes
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError
from colocate.features.recordings.differences import Compared, FirstDifference
from colocate.features.recordings.files import STEPS, RoleFolder, RowOrder, lines_of, mark_end, to_line
from colocate.features.recordings.given import Compare, Replay
from colocate.features.recordings.joining import Joining
from colocate.features.recordings.messages import COMPARISON, RECORDING, Gave, Noticed, Played, Recorded
from colocate.features.recordings.whole import described
from colocate.features.recordings.worker import RecordingsOfWorker

_log = logging.getLogger("colocate")


class RecordingsOfGroup(OfGroup):
    """The roles of a group that are recorded."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.recorded: dict[str, Path] = {}
        self.played: dict[str, str] = {}
        self.joining: dict[str, Joining] = {}  # of roles that are compared here, as they have other ranks
        self._life = secrets.token_hex(8)
        self._rows: dict[int, list[tuple[int, int]]] = {}  # rank and index of those that came, by call
        self._files: dict[str, RowOrder] = {}  # where that is written, by role

    def builds(self) -> Mapping[str, Sequence[Played]]:
        """Return which recordings roles are replayed from, or compared with.

        Raises:
            ConfigError: There is none of a role, or one to be replayed is of another number of ranks, or one is of
                another seed.
        """
        found = {}
        for name, spec in self._worker_group.declared.specs.items():
            given = [each for each in (spec.replay, spec.compare) if each is not None]
            if given:
                role = self._worker_group.roles[name]
                found[name] = [_played(self._worker_group, role, each, self._life) for each in given]
                if name not in self.joining and found[name][-1].joins:
                    self.joining[name] = Joining(role, found[name][-1], self._tell)
        self.played = {name: given[0].folder for name, given in found.items()}
        return found

    def begun(self, recorded: Mapping[str, Path]) -> None:
        """Note that roles are recorded, and in which folders: from now on the order in which their rows come, too."""
        self.recorded |= recorded
        self._files |= {name: RowOrder(folder) for name, folder in recorded.items()}
        if "rows" in features.FEATURES:
            cast("Any", self._worker_group.part("rows")).listeners = (self._row_came,)

    def over(self, role: str) -> None:
        """Note that a role isn't recorded any more."""
        self.recorded.pop(role, None)
        if (file := self._files.pop(role, None)) is not None:
            file.close()

    def mark(self, step: int) -> None:
        """Note that a step is over: `Replay(step=...)` begins with what comes after the one before it."""
        line = to_line({"step": step, "calls": {self._worker_group.name: self._worker_group.order.next_seq - 1}})
        for folder in {each.parent for each in self.recorded.values()}:
            with contextlib.closing(GrowingFile(folder / STEPS)) as file:
                file.add(line)

    def _row_came(self, call: Any, slot: int, row: int) -> None:
        if call.role not in self._files:
            return
        if call.seq not in self._rows:
            self._rows[call.seq] = []
            call._then(self._rows_over)
        self._rows[call.seq].append((call.rank_of(slot), row))

    def _rows_over(self, call: Any) -> None:
        rows, file = self._rows.pop(call.seq, []), self._files.get(call.role)
        if file is not None:
            file.add(call.seq, rows=rows)

    def ended(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Note which rows ranks had, where these were chosen."""
        file = self._files.get(call.role)
        if file is None or call.partition is None or slot != call.targets[0]:
            return
        file.add(call.seq, partition=[[*map(int, rows)] for rows in call.partition])

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Tell the user what a rank has noticed, or take what it gave."""
        if isinstance(message, Noticed):
            self._tell(message.text)
            return
        assert isinstance(message, Gave)
        order = self._worker_group.order
        with order.lock:
            call = order.pending.get(message.seq)
            if call is not None and call.role in self.joining:  # else another driver's wanted it
                self.joining[call.role].heard(call, call.rank_of(worker.slot), body)

    def renewed(self) -> None:
        """End what is recorded: the calls of the new workers are others, from a checkpoint on."""
        if self.recorded:
            self._tell(f"it has been restarted, with which the recording of {', '.join(self.recorded)} has ended")
            for role, folder in [*self.recorded.items()]:
                mark_end(folder, "its group was restarted")
                self.over(role)
        self.restored(None)

    def restored(self, saved: Any) -> None:
        """Compare calls that come after a checkpoint, which may come again."""
        for joining in self.joining.values():  # after the calls that are over
            self._worker_group.services.timers.soon(joining.begin_anew)

    def ending(self, grace: float) -> Sequence[BaseException]:
        """Compare no more."""
        for joining in self.joining.values():
            joining.close()
        return ()

    def shown(self, role: str) -> Mapping[str, str]:
        """Return where a role is recorded, if it is."""
        shown = {"recorded": str(self.recorded[role])} if role in self.recorded else {}
        if role in self.played:
            is_replayed = self._worker_group.declared.specs[role].replay is not None
            shown["replayed" if is_replayed else "compared"] = self.played[role]
        return shown

    def _tell(self, text: str) -> None:
        words = f"group {self._worker_group.name!r}, {text}"
        self._worker_group.services.printer.soon(lambda: _log.warning("%s", words))


class Recorder:
    """Roles that are being recorded. Made by `Runtime.record`; a context manager that ends it.

    Attributes:
        folder: Where they are.
    """

    def __init__(self, folder: Path, groups: Mapping[str, tuple[WorkerGroup, Sequence[RoleInfo]]]) -> None:
        """Use `Runtime.record`."""
        self.folder = folder
        self._groups = groups

    def close(self) -> None:
        """Record no more, and wait until all is written."""
        for call in self._end():
            with suppress(ColocateError):  # of a group that has failed, whose workers have written what they could
                call.result()

    def _end(self) -> list[PendingCall]:
        """Record no more; return the calls that are over when all is written."""
        groups, self._groups = self._groups, {}
        calls = []
        for worker_group, roles in groups.values():
            part = of_group(worker_group)
            if worker_group.alive and any(role.name in part.recorded for role in roles):
                with suppress(ColocateError):  # likewise
                    calls.append(_send(worker_group, RECORDING, recorded=tuple(_over(role) for role in roles)))
            for role in roles:
                part.over(role.name)
        return calls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # a call may never end: what is left is written without anybody waiting for it
            self._end()


def record(views: Any, folder: str | os.PathLike[str], limit: str | int | None, inputs: Any, services: Any) -> Recorder:
    """See `Runtime.record`."""
    refuse_to_wait("runtime.record")
    most = None if limit is None else parse_bytes(limit, "runtime.record(limit)")
    place = Path(os.path.abspath(folder))
    groups: dict[str, tuple[WorkerGroup, list[RoleInfo]]] = {}
    with_inputs = {(worker_group.name, role.name) for worker_group, role in _viewed(inputs)}
    for worker_group, role in _viewed(views):
        if worker_group.services is not services:
            raise ConfigError(f"runtime.record: role {role.name!r} is of another runtime")
        if (where := of_group(worker_group).recorded.get(role.name)) is not None:
            raise ConfigError(f"runtime.record: role {role.name!r} is recorded already, in {where}")
        groups.setdefault(worker_group.name, (worker_group, []))[1].append(role)
    if not groups:
        raise ConfigError("runtime.record: name at least one view")
    if others := with_inputs - {(name, role.name) for name, (_, roles) in groups.items() for role in roles}:
        raise ConfigError(f"runtime.record(inputs): role {min(others)[1]!r} isn't among the roles that are recorded")
    for worker_group, _ in groups.values():
        refuse_here(worker_group, "runtime.record")
    whole = Recorder(place, groups)
    made: list[Path] = []
    try:
        recorded = {
            name: [_begin(place, worker_group, role, made, most, (name, role.name) in with_inputs) for role in roles]
            for name, (worker_group, roles) in groups.items()
        }
        for name, (worker_group, _) in groups.items():
            of_group(worker_group).begun({each.role: Path(str(each.folder)) for each in recorded[name]})
            # Calls that were received before a rank has got ready for them would have another way there.
            _tell(worker_group, [attrs.evolve(each, begins=False) for each in recorded[name]])
            _tell(worker_group, recorded[name])
    except Exception:  # all roles are recorded, or none
        whole.close()
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise
    except BaseException:  # nobody waits any more
        whole._end()
        raise
    return whole


def of_group(worker_group: WorkerGroup) -> RecordingsOfGroup:
    """Return what is known of the recordings of a group's roles."""
    return cast("RecordingsOfGroup", worker_group.part("recordings"))


def _viewed(views: Any) -> Iterator[tuple[WorkerGroup, RoleInfo]]:
    for view in views if isinstance(views, Iterable) and not isinstance(views, str) else [views]:
        yield viewed(view, "runtime.record(view")


def _begin(
    place: Path, worker_group: WorkerGroup, role: RoleInfo, made: list[Path], limit: int | None, inputs: bool
) -> Recorded:
    path = place / f"{worker_group.name}.{role.name}"
    cls = f"{role.cls.__module__}:{role.cls.__qualname__}"
    RoleFolder(
        path,
        worker_group.name,
        role.name,
        cls,
        len(role.slots),
        worker_group.services.seed,
        {name: described(spec) for name, spec in role.methods.items()},
        _meshes(role),
    ).begin()
    made.append(path)
    return Recorded(role.name, str(path), limit, inputs, begins=True)


def _tell(worker_group: WorkerGroup, recorded: Sequence[Recorded]) -> None:
    """Tell all workers, in the order of the group's calls, and wait until they have done it."""
    _call(worker_group, RECORDING, recorded=tuple(recorded))


def _call(worker_group: WorkerGroup, said: str, **arguments: Any) -> Any:
    return _send(worker_group, said, **arguments).result()


def _over(role: RoleInfo) -> Recorded:
    return Recorded(role.name, None)


def _send(worker_group: WorkerGroup, said: str, **arguments: Any) -> PendingCall:
    return start(for_all(worker_group, said, said, RecordingsOfWorker.calls[said], arguments))


def _played(worker_group: WorkerGroup, role: RoleInfo, given: Replay | Compare, life: str) -> Played:
    """Return a recording that a role is replayed from, or compared with, as workers are told of it.

    Raises:
        ConfigError: It isn't there, or is to be replayed and isn't of as many ranks, or of another seed.
    """
    found = RoleFolder.find(given.folder, worker_group.name, role.name)
    what = f"role {role.name!r}: the recording in {given.folder} is of"
    if found.ranks != len(role.slots) and isinstance(given, Replay):
        raise ConfigError(f"{what} {found.ranks} ranks, and the role has {len(role.slots)}: give it as many slots")
    seed = worker_group.services.seed
    if found.seed != seed and not (isinstance(given, Replay) and given.loose):
        raise ConfigError(f"{what} the seed {found.seed}, and the runtime has {seed}: other roles would draw otherwise")
    after = 0 if given.step is None else _before(found, given.step)
    if isinstance(given, Replay):
        return Played(str(found.path), True, loose=given.loose, after=after, life=life)
    joins = found.ranks != len(role.slots) or json.dumps(found.meshes) != json.dumps(_meshes(role))
    return Played(str(found.path), False, tolerance=given.tolerance, after=after, joins=joins, life=life)


def _meshes(role: RoleInfo) -> dict[str, dict[str, int]]:
    return {name: mesh.shape for name, mesh in role.meshes.items()}


def _before(found: RoleFolder, step: int) -> int:
    """Return the last call of before a step."""
    told = lines_of(found.path.parent / STEPS, _check_step)
    if not any(each["step"] == step for each in told):
        has = f"{told[0]['step']} to {told[-1]['step']}" if told else "none"
        raise ConfigError(f"the recording in {found.path.parent} has no step {step}: it has {has}")
    earlier = [each["calls"].get(found.group, 0) for each in told if each["step"] < step]
    return max(earlier, default=0)


def _check_step(told: Mapping[str, Any]) -> None:
    if not all(type(number) is int for number in (told["step"], *told["calls"].values())):
        raise ValueError("its step or its calls are no numbers")


@attrs.frozen
class ComparedMethod:
    """What came of comparing the calls of a method with those that were recorded.

    Attributes:
        method: The method.
        calls: How many calls of it ended, on all ranks together; over another number of ranks these are one.
        differ: How many of these, or of their rows, gave something else.
        numbers: How many numbers, texts and other parts were compared.
        different: How many of them differ.
        absolute: The largest absolute difference of numbers, also of those within the tolerance.
        relative: The largest one relative to what was recorded.
        arguments: How many calls, or rows, had other arguments.
        missing: How many weren't recorded, or can't be compared over another number of ranks.
        left: How many calls were recorded, and haven't come.
        first: The first difference, or why one can't be compared, in words; None where there is none.
        origin: The call that differs first, and which parameter of it, if its arguments do; None where none does. Of
            all compared roles of a group, the one whose `seq` is the least is where to begin to look.
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
    """Return what came so far of comparing a role with a recording (`role(...).on(compare=...)`), by method.

    Raises:
        ConfigError: It is no view, or of a role that isn't compared.
    """
    worker_group, role = viewed(view, "comparison(view")
    if worker_group.declared.specs[role.name].compare is None:
        raise ConfigError(f"comparison: role {role.name!r} isn't compared: declare it with .on(compare=...)")
    refuse_to_wait("comparison")
    worker_group.check()
    by_method: dict[str, list[Compared]] = {}
    told = _call(worker_group, COMPARISON, role=role.name)
    if (joining := of_group(worker_group).joining.get(role.name)) is not None:
        worker_group.services.timers.run(lambda: None)  # calls that are over have told so
        told = [joining.table()]
    for methods in told:
        for name, compared in (methods or {}).items():
            by_method.setdefault(name, []).append(compared)
    return [_joined(name, ranks) for name, ranks in by_method.items()]


def _joined(method: str, ranks: Sequence[Compared]) -> ComparedMethod:
    sums = {name: sum(getattr(each, name) for each in ranks) for name in ("calls", "differ", "numbers", "different")}
    most = {name: max(getattr(each, name) for each in ranks) for name in ("absolute", "relative")}
    more = {name: sum(getattr(each, name) for each in ranks) for name in ("arguments", "missing", "left")}
    first = next((each.first for each in ranks if each.first), None)
    origins = [each.origin for each in ranks if each.origin is not None]
    origin = min(origins, key=lambda each: each.seq, default=None)
    return ComparedMethod(method, **sums, **most, **more, first=first, origin=origin)
