"""Checkpoints of a group: what its roles' `save` has written, whole or not there, and going on from that."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import colocate
from colocate._calls.pending import PendingCall
from colocate._role.role import RoleInfo
from colocate._system.files import atomic_folder, nobody_renames
from colocate._system.numbers import FOREVER_S, shown
from colocate._values.dispatch import plan
from colocate._views.sending import everyone, ready, refuse_inside, start
from colocate._worker_group.saved import Checkpoint, Tag, does_nothing, refuse_others, savable
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError, RoleError
from colocate.worker.serving.checkpoint import RECORD
from colocate.worker.serving.contents import Look, sizes_of
from colocate.worker.serving.functions import CHECKPOINT, LOOK, RESTORE, SPECS


def write(worker_group: WorkerGroup, folder: Path, tag: Tag) -> None:
    """Have every role of a group save itself, between its calls; a restart goes on from that.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or none has them; or the folder is something else's,
            or the tag nothing to write down.
        RoleError: A `save` raised, or what it has returned failed, or not all is written when both are over; or a
            kept call before it has failed, whose resident nobody has used or can use any more. There is no checkpoint
            then, and an earlier one stays.
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
            files = _looked_at(worker_group, part, saved)
            record = {
                "id": found.identity,
                "tag": tag,
                "group": worker_group.name,
                "generation": worker_group.generation,
                "roles": {
                    name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                },
                "files": files,
                "colocate": colocate.__version__,
            }
            (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    worker_group.home.changed()


def _looked_at(worker_group: WorkerGroup, part: Path, saved: Mapping[str, RoleInfo]) -> dict[str, tuple[int, str]]:
    """Return the files that a group has written, with size and digest, as its workers see them.

    Raises:
        RoleError: Something isn't there yet, or is being written.
    """

    def refuse(name: str, why: str) -> NoReturn:
        role = name.partition("/")[0]
        raise RoleError(
            f"the checkpoint of group {worker_group.name!r} isn't all written, though {role}.save() is over on all "
            f"ranks: {why}. What it writes on a thread or in a process of its own, it has to wait for or to return (a "
            "future, a thread, what dcp.async_save returns); nothing counts, and an earlier checkpoint stays",
            group=worker_group.name,
            role=role,
            method="save",
        )

    before = sizes_of(part)
    for name, info in saved.items():
        if not (does_nothing(info.cls) or any(each.startswith(f"{name}/") for each in before)):
            refuse(name, "there is no file in its folder. (A role without a state has no save() and restore().)")
    for name in before:
        if name.endswith(".distcp") and f"{name.rpartition('/')[0]}/.metadata" not in before:
            refuse(name, f"torch.distributed.checkpoint has written {name}, and no .metadata beside it")
    looks: list[Look] = _submit(worker_group, part, LOOK, names=[*before]).result()
    for name in [name for open_ones, _ in looks for name in open_ones]:
        refuse(name, f"{name} is open there, to be written")
    after = sizes_of(part)
    for name in sorted({name for name, _ in before.items() ^ after.items()}):
        refuse(name, f"{name} has changed since")
    digests = {name: digest for _, digested in looks for name, digest in digested.items()}
    return {name: (size, digests[name]) for name, (size, _) in after.items()}


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


def _submit(worker_group: WorkerGroup, folder: Path, what: str = CHECKPOINT, **more: Any) -> PendingCall:
    role, spec = everyone(worker_group), SPECS[what]
    planned = plan(spec.dispatch, {"directory": str(folder), **more}, role.ranks)
    call = PendingCall(what, "", what, role.slots)
    return start(ready(worker_group, call, role, spec, planned, [], FOREVER_S))  # large ones take long
