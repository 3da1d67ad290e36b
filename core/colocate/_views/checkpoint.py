"""Checkpoints of a group: what its roles' `save` has written, whole or not there, and going on from that."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from colocate._calls.pending import PendingCall
from colocate._calls.records import CheckpointRecord
from colocate._role.role import RoleInfo
from colocate._system.files import atomic_folder, nobody_renames
from colocate._system.numbers import FOREVER_S, shown
from colocate._system.threads import Thread
from colocate._values.dispatch import plan
from colocate._version import __version__
from colocate._views.sending import everyone, ready, refuse_inside, start
from colocate._worker_group.saved import Checkpoint, Tag, does_nothing, refuse_others, savable, takes_other_ranks
from colocate._worker_group.saving import Saves, Saving
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError, RoleError
from colocate.worker.serving.checkpoint import RECORD
from colocate.worker.serving.contents import sizes_of
from colocate.worker.serving.functions import CHECKPOINT, RESTORE, SPECS


def write(worker_group: WorkerGroup, folder: Path, tag: Tag) -> None:
    """Have every role of a group save itself, between its calls; a restart goes on from that.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or none has them; or the folder is something else's,
            or the tag nothing to write down.
        RoleError: A `save` raised, or what it has returned failed, or not all is written when both are over; or a
            kept call before it has failed, whose resident nobody has used or can use any more; or the checkpoint before
            has failed, and nobody was told. There is no checkpoint then, and an earlier one stays.
    """
    with _begun(worker_group, folder, tag, wait=True) as complete:
        complete()
    worker_group.home.changed()


def begin(worker_group: WorkerGroup, folder: Path, tag: Tag) -> Saving:
    """As `write`, but roles have only taken their states when this returns: the rest goes on beside the calls."""
    saving = Saving(worker_group, tag, folder.absolute())
    begun = _begun(worker_group, folder, tag, wait=False)
    complete = begun.__enter__()
    try:
        worker_group.restarts.saving = saving
        name = f"colocate-checkpoint-{worker_group.name}"
        Thread(target=_go_on, args=(worker_group, saving, begun, complete), name=name).start()
    except BaseException as error:  # no thread is to be had
        worker_group.restarts.saving = None
        begun.__exit__(type(error), error, error.__traceback__)
        raise
    return saving


def _go_on(
    worker_group: WorkerGroup,
    saving: Saving,
    begun: contextlib.AbstractContextManager[object],
    complete: Callable[[], None],
) -> None:
    """Complete a checkpoint, on a thread of its own. Who waits for it is told last."""
    try:
        try:
            complete()
        except BaseException as error:
            begun.__exit__(type(error), error, error.__traceback__)
            raise
        begun.__exit__(None, None, None)
        worker_group.home.changed()
    except BaseException as error:
        saving._fail(error)
    else:
        saving._settle(None)


@contextlib.contextmanager
def _begun(worker_group: WorkerGroup, folder: Path, tag: Tag, wait: bool) -> Iterator[Callable[[], None]]:
    """A block in which a checkpoint is to be completed, by what it is given, and behind which it counts.

    All roles have taken their states when it is entered. It may be left on another thread.
    """
    if not isinstance(tag, str | int | float):
        raise ConfigError(f"checkpoint(tag) must be text, a number or None, not {shown(tag)}")
    saved = savable(worker_group.roles)
    refuse_inside("checkpoint", worker_group.name)
    folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()  # it gets its name by a rename
    found = Checkpoint(folder, tag, uuid.uuid4().hex)
    with worker_group.restarts.writing:  # as long as it is under way
        worker_group.restarts.raise_unasked()
        _refuse_forgotten(worker_group)
        with nobody_renames(folder):
            refuse_others(folder, saved)
        worker_group.residents.raise_untold()
        generation, saves = worker_group.generation, worker_group.saves
        with atomic_folder(folder, _committing(worker_group, found, saved, saves, wait)) as part:
            began = time.time()
            for name in saved:
                (part / name).mkdir()
            is_left = any(_submit(worker_group, part, wait=wait).result())
            taken = time.time()
            worker_group.residents.raise_untold()

            files: dict[str, tuple[int, str]] = {}

            def complete() -> None:
                if is_left:
                    saves.finish(part)
                _refuse_fixed(worker_group, part, saved)
                files.update(_looked_at(worker_group.name, saves, part, saved))
                record = {
                    "id": found.identity,
                    "tag": tag,
                    "group": worker_group.name,
                    "generation": generation,
                    "roles": {
                        name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                    },
                    "files": files,
                    "colocate": __version__,
                }
                (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

            yield complete
        nbytes = sum(size for size, _ in files.values())
        told = CheckpointRecord(worker_group.name, tag, folder, nbytes, began, taken, time.time())
        worker_group.services.tell("colocate_group_checkpointed", told)


def _refuse_fixed(worker_group: WorkerGroup, part: Path, saved: Mapping[str, RoleInfo]) -> None:
    """Refuse what only as many ranks could go on from, where a restart may have another number of them.

    Raises:
        RoleError: It is such.
    """
    for name, info in saved.items() if worker_group.may_resize else ():
        if not takes_other_ranks(info.cls, part / name) and not does_nothing(info.cls):
            raise RoleError(
                f"group {worker_group.name!r} may have {worker_group.home.least} to {len(worker_group.whole)} slots, "
                f"and what {name}.save() writes can be restored by {len(info.slots)} ranks alone: write it by "
                "torch.distributed.checkpoint, or have restore(directory, ranks), which is told how many have saved",
                group=worker_group.name,
                role=name,
                method="save",
            )


def _looked_at(group: str, saves: Saves, part: Path, saved: Mapping[str, RoleInfo]) -> dict[str, tuple[int, str]]:
    """Return the files that a group has written, with size and digest, as its workers see them.

    Raises:
        RoleError: Something isn't there yet, or is being written.
    """

    def refuse(name: str, why: str) -> NoReturn:
        role = name.partition("/")[0]
        raise RoleError(
            f"the checkpoint of group {group!r} isn't all written, though {role}.save() is over on all "
            f"ranks: {why}. What it writes on a thread or in a process of its own, it has to wait for or to return (a "
            "future, a thread, what dcp.async_save returns); nothing counts, and an earlier checkpoint stays",
            group=group,
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
    being_written, digests = saves.look(part, [*before])
    for name in being_written:
        refuse(name, f"{name} is open there, to be written")
    after = sizes_of(part)
    for name in sorted({name for name, _ in before.items() ^ after.items()}):
        refuse(name, f"{name} has changed since")
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
            for part in worker_group.parts.values():
                part.restored()
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
    worker_group: WorkerGroup, checkpoint: Checkpoint, saved: Collection[str], saves: Saves, wait: bool
) -> Iterator[None]:
    """A failed group is restored from the last checkpoint before: nothing may take its folder's name then.

    One that was written beside the calls counts also when the group is closing, as long as that waits for it.
    """
    with worker_group.order.lock:
        if wait or worker_group.alive:
            worker_group.check()
        saves.check()  # of the workers that have written it: the group may have been restarted since
        refuse_others(checkpoint.folder, saved)  # it may have been filled meanwhile
        yield
        worker_group.restarts.committed(checkpoint)


def _submit(worker_group: WorkerGroup, folder: Path, what: str = CHECKPOINT, **more: Any) -> PendingCall:
    role, spec = everyone(worker_group), SPECS[what]
    planned = plan(spec.dispatch, {"directory": str(folder), **more}, role.ranks)
    call = PendingCall(what, "", what, role.slots)
    return start(ready(worker_group, call, role, spec, planned, [], FOREVER_S))  # large ones take long
