"""`runtime.record`: what calls of roles give is written into a folder, from one call in their group's order on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import attrs

from colocate._calls.pending import PendingCall
from colocate._protocol.message import Message
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.files import GrowingFile
from colocate._system.numbers import FOREVER_S, parse_bytes
from colocate._values.dispatch import plan
from colocate._views.sending import everyone, ready, recording, refuse_inside, start
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError
from colocate.features.recordings.files import RoleFolder
from colocate.features.recordings.messages import RECORDING, Noticed, Recorded
from colocate.features.recordings.worker import RecordingsOfWorker

_log = logging.getLogger("colocate")


class RecordingsOfGroup(OfGroup):
    """The roles of a group that are recorded."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.recorded: dict[str, Path] = {}

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Tell the user what a rank has noticed."""
        assert isinstance(message, Noticed)
        self._tell(message.text)

    def renewed(self) -> None:
        """End what is recorded: the calls of the new workers are others, from a checkpoint on."""
        if self.recorded:
            self._tell(f"it has been restarted, with which the recording of {', '.join(self.recorded)} has ended")
            self.recorded.clear()

    def shown(self, role: str) -> Mapping[str, str]:
        """Return where a role is recorded, if it is."""
        return {"recorded": str(self.recorded[role])} if role in self.recorded else {}

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
        self._steps: GrowingFile | None = None

    def close(self) -> None:
        """Record no more, and wait until all is written."""
        groups, self._groups = self._groups, {}
        for worker_group, roles in groups.values():
            part = of_group(worker_group)
            if worker_group.alive and any(role.name in part.recorded for role in roles):
                with suppress(ColocateError):  # of a group that has failed, whose workers have written what they could
                    _tell(worker_group, [Recorded(role.name, None) for role in roles])
            for role in roles:
                part.recorded.pop(role.name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record(views: Any, folder: str | os.PathLike[str], limit: str | int | None, services: Any) -> Recorder:
    """See `Runtime.record`."""
    refuse_to_wait("runtime.record")
    most = None if limit is None else parse_bytes(limit, "runtime.record(limit)")
    place = Path(os.path.abspath(folder))
    groups: dict[str, tuple[WorkerGroup, list[RoleInfo]]] = {}
    for view in views if isinstance(views, Iterable) and not isinstance(views, str) else [views]:
        found = getattr(view, "__dict__", {}).get("_colocate_view")
        if found is None:
            raise ConfigError(f"runtime.record({view!r}): it takes views, as group.role(name) gives them")
        worker_group, role = cast("tuple[WorkerGroup, RoleInfo]", found)
        if worker_group.services is not services:
            raise ConfigError(f"runtime.record: role {role.name!r} is of another runtime")
        if (where := of_group(worker_group).recorded.get(role.name)) is not None:
            raise ConfigError(f"runtime.record: role {role.name!r} is recorded already, in {where}")
        groups.setdefault(worker_group.name, (worker_group, []))[1].append(role)
    if not groups:
        raise ConfigError("runtime.record: name at least one view")
    for worker_group, _ in groups.values():
        if (recorder := recording(worker_group)) is not None:
            recorder.refuse_call("runtime.record")
        worker_group.check()
        refuse_inside("runtime.record", worker_group.name)
    for worker_group, roles in groups.values():
        begun = [_begin(place, worker_group, role, most) for role in roles]
        # Calls that were received before a rank has got ready for them would have another way there.
        _tell(worker_group, [attrs.evolve(each, begins=False) for each in begun])
        _tell(worker_group, begun)
        of_group(worker_group).recorded |= {role.name: place for role in roles}
    return Recorder(place, groups)


def of_group(worker_group: WorkerGroup) -> RecordingsOfGroup:
    """Return what is known of the recordings of a group's roles."""
    return cast("RecordingsOfGroup", worker_group.part("recordings"))


def _begin(place: Path, worker_group: WorkerGroup, role: RoleInfo, limit: int | None) -> Recorded:
    path = place / f"{worker_group.name}.{role.name}"
    cls = f"{role.cls.__module__}:{role.cls.__qualname__}"
    RoleFolder(
        path, worker_group.name, role.name, cls, len(role.slots), worker_group.services.seed, [*role.methods]
    ).begin()
    return Recorded(role.name, str(path), limit, begins=True)


def _tell(worker_group: WorkerGroup, recorded: Sequence[Recorded]) -> None:
    """Tell all workers, in the order of the group's calls, and wait until they have done it."""
    info, spec = everyone(worker_group), RecordingsOfWorker.calls[RECORDING]
    planned = plan(spec.dispatch, {"recorded": tuple(recorded)}, info.ranks)
    call = PendingCall(RECORDING, "", RECORDING, info.slots)
    start(ready(worker_group, call, info, spec, planned, [], FOREVER_S)).result()
