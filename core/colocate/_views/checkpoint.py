"""Checkpoints of a group: what its roles' `save` has written, whole or not there, and going on from that."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import colocate
from colocate._calls.pending import PendingCall
from colocate._system.files import atomic_folder, nobody_renames
from colocate._system.numbers import FOREVER_S, shown
from colocate._values.dispatch import plan
from colocate._views.sending import everyone, ready, refuse_inside, start
from colocate._worker_group.saved import Checkpoint, Tag, refuse_others, savable
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError
from colocate.worker.serving.checkpoint import RECORD
from colocate.worker.serving.functions import CHECKPOINT, RESTORE, SPECS


def write(worker_group: WorkerGroup, folder: Path, tag: Tag) -> None:
    """Have every role of a group save itself, between its calls; a restart goes on from that.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or none has them; or the folder is something else's,
            or the tag nothing to write down.
        RoleError: A `save` raised, or a kept call before it whose resident nobody has used or can use any more: there
            is no checkpoint then.
    """
    if not isinstance(tag, str | int | float):
        raise ConfigError(f"checkpoint(tag) must be text, a number or None, not {shown(tag)}")
    saved = savable(worker_group.roles)
    refuse_inside("checkpoint", worker_group.name)
    folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()  # it gets its name by a rename
    found = Checkpoint(folder, tag, uuid.uuid4().hex)
    with worker_group.restarts.writing:
        _refuse_forgotten(worker_group)
        with nobody_renames(folder):
            refuse_others(folder, saved)
        worker_group.residents.raise_untold()
        with atomic_folder(folder, _committing(worker_group, found, worker_group.generation, saved)) as part:
            for name in saved:
                (part / name).mkdir()
            _submit(worker_group, part).result()
            worker_group.residents.raise_untold()
            record = {
                "id": found.identity,
                "tag": tag,
                "group": worker_group.name,
                "generation": worker_group.generation,
                "roles": {
                    name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                },
                "colocate": colocate.__version__,
            }
            (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    worker_group.home.changed()


def restore(worker_group: WorkerGroup, folder: Path) -> Tag:
    """Have the roles of a group go on from a checkpoint, between its calls; a restart goes on from that, too.

    Raises:
        ConfigError: There is none for this group.
        RoleError: A `restore` raised, or another checkpoint took the place of this one meanwhile. Some roles may be as
            they were, others not.
    """
    refuse_inside("restore", worker_group.name)
    with worker_group.restarts.writing:
        found, generation = Checkpoint.read(folder.absolute(), worker_group.roles), worker_group.generation
        _submit(worker_group, found.folder, RESTORE, identity=found.identity).result()
        with worker_group.order.lock:
            worker_group.check()
            if worker_group.generation != generation:
                raise ColocateError(
                    f"group {worker_group.name!r} was restarted while {found.tag!r} was restored: that is void"
                )
            worker_group.restarts.began_from(found)
            worker_group.stale |= dict.fromkeys(worker_group.synced, "the group was restored from a checkpoint since")
    worker_group.home.changed()
    return found.tag


def _refuse_forgotten(worker_group: WorkerGroup) -> None:
    """A run goes on, and has a checkpoint of this group, which nobody has restored: what is saved now is another's."""
    left = worker_group.services.resumed.get(worker_group.name)
    if left is not None and worker_group.restarts.checkpoint is None:
        raise ConfigError(
            f"group {worker_group.name!r} has begun anew, though the run was resumed and has a checkpoint of it in "
            f"{left}: call group.restore(folder) with that folder (it lies in run.resumed), or pass "
            "spawn(restore=folder). A group that is meant to begin anew needs another name"
        )


@contextlib.contextmanager
def _committing(
    worker_group: WorkerGroup, checkpoint: Checkpoint, generation: int, saved: Collection[str]
) -> Iterator[None]:
    """A failed group is restored from the last checkpoint before: nothing may take its folder's name then."""
    with worker_group.order.lock:
        worker_group.check()
        if worker_group.generation != generation:
            raise ColocateError(
                f"group {worker_group.name!r} was restarted while its checkpoint {checkpoint.tag!r} was written: that "
                "is void"
            )
        refuse_others(checkpoint.folder, saved)  # it may have been filled meanwhile
        yield
        worker_group.restarts.committed(checkpoint)


def _submit(worker_group: WorkerGroup, folder: Path, what: str = CHECKPOINT, **more: str) -> PendingCall:
    role, spec = everyone(worker_group), SPECS[what]
    planned = plan(spec.dispatch, {"directory": str(folder), **more}, role.ranks)
    call = PendingCall(what, "", what, role.slots)
    return start(ready(worker_group, call, role, spec, planned, [], FOREVER_S))  # large ones take long
