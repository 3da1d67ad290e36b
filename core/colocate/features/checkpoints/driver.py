"""The driver's half of checkpoints: saves all roles of a group or none, and restores roles from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import attrs

from colocate._calls.pending import PendingCall
from colocate._calls.records import CheckpointRecord
from colocate._calls.sending import for_all, send_now
from colocate._protocol import to_worker
from colocate._protocol.message import Message
from colocate._role.role import RoleInfo
from colocate._system.deadline import Deadline
from colocate._system.files import atomic_folder, nobody_renames
from colocate._system.limits import AFTER_FORCE_S
from colocate._system.numbers import shown
from colocate._system.threads import Thread
from colocate._version import __version__
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ClosedError, ColocateError, ConfigError, RoleError
from colocate.features.checkpoints.checkpoint import (
    Checkpoint,
    Tag,
    does_nothing,
    refuse_others,
    savable,
    takes_other_ranks,
)
from colocate.features.checkpoints.contents import sizes_of
from colocate.features.checkpoints.messages import CHECKPOINT, RESTORE, Saved
from colocate.features.checkpoints.saving import Saves, Saving
from colocate.features.checkpoints.share import RECORD
from colocate.features.checkpoints.worker import CheckpointsOfWorker


class CheckpointsOfGroup(OfGroup):
    """The driver's half of a group's checkpoints: the last checkpoint, and the checkpoint in progress.

    Attributes:
        checkpoint: The last checkpoint, from which a restart restores; None before the first.
        written: The last checkpoint that was made since the roles started; None for none.
        saving: The last checkpoint begun with `wait=False`, perhaps still in progress.
        saves: The requests to the workers of this generation.
        writing: A lock, held while a checkpoint is written, so that names are assigned in the order of the states.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.checkpoint: Checkpoint | None = None
        self.written: Checkpoint | None = None
        self.saving: Saving | None = None
        self.saves = Saves(worker_group)
        self.writing = threading.Lock()
        self._restored: Tag = None  # The tag of the restored checkpoint.
        self._began: str | None = None  # The identity of the restored checkpoint.
        self._first: Path | None = None  # The folder to restore from at the first start; None afterwards.

    # -- hooks

    def starts(self) -> tuple[str, str] | None:
        """Return the folder and identity of the checkpoint to restore the roles from; None without a checkpoint."""
        group, checkpoint = self._worker_group, self.checkpoint
        if self._first is not None:
            checkpoint, self._first = Checkpoint.read(self._first, group.roles), None
        elif checkpoint is not None and group.may_resize:
            Checkpoint.read(checkpoint.folder, group.roles)  # This raises if the roles can't be restored.
        self.began_from(checkpoint)
        for name, saved in () if checkpoint is None else checkpoint.parts.items():
            group.part(name).restored(saved)
        return None if checkpoint is None else (str(checkpoint.folder), checkpoint.identity)

    def source(self) -> str | None:
        """Return words that name the last checkpoint, for messages; None without a checkpoint."""
        return None if self.checkpoint is None else f"its checkpoint {self.checkpoint.tag!r}"

    def tag(self) -> Tag:
        """Return the tag of the checkpoint that the roles were restored from."""
        return self._restored

    def renewed(self) -> None:
        """Create a new request state after a restart, because the workers are new."""
        self.saves = Saves(self._worker_group)

    def failed(self, error: ColocateError) -> None:
        """Mark a checkpoint in progress as void, and fail pending requests."""
        if self._worker_group.closed_by is None and self.saving is not None and not self.saving.done():
            self.saving.is_void = True
        self.saves.fail(error)

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Pass a worker's answer to the pending request."""
        assert isinstance(message, Saved)
        self.saves.answered(worker, message, body)

    def under_way(self) -> str | None:
        """Return the label of the checkpoint that is being written; None if there is none."""
        return None if self.saving is None or self.saving.done() else self.saving.label

    def ending(self, grace: float) -> Sequence[BaseException]:
        """Wait up to `grace` seconds for a checkpoint in progress, and return the error that no caller has seen."""
        saving, group = self.saving, self._worker_group
        if saving is None:
            return []
        if not saving.done():
            deadline = Deadline(grace)
            if group.life.failure is None:
                group.send(group.live(), to_worker.Stop())  # This tells running calls that the group is closing.
            group.workforce.wind_down(grace, deadline)
            saving._then(lambda _: group.workforce.stages.wake())
            group.workforce.stages.wait(lambda: group.hurried or saving.done(), group.workforce.overdue)
            late = ClosedError(
                f"{saving.label} of group {group.name!r} wasn't all written {grace:g} s after the group was closed by "
                f"{group.closed_by}: it is void, and an earlier one stays. Wait for its result() before, or give "
                "close(grace=...) as long as it takes",
                closed_by=group.closed_by,
            )
            self.saves.fail(late)
            if not saving.wait(AFTER_FORCE_S):  # A thread that writes to a disk notices the close late.
                return [late]
        error = saving.unreported_failure()
        return [] if error is None else [error]

    def kept(self) -> tuple[Checkpoint | None, Tag] | None:
        """Return the last checkpoint and the tag of the restored one, for the group's next driver."""
        return None if self.checkpoint is None and self._restored is None else (self.checkpoint, self._restored)

    def take(self, kept: tuple[Checkpoint | None, Tag]) -> None:
        """Adopt the checkpoint and tag that the earlier driver's `kept` has returned."""
        self.checkpoint, self._restored = kept

    # -- state

    def begins_at(self, folder: Path) -> None:
        """Set the checkpoint that the group restores from at the first start.

        Raises:
            ConfigError: The folder has no checkpoint for this group.
        """
        Checkpoint.read(folder.absolute(), self._worker_group.roles)  # This raises before any worker is started.
        self._first = folder.absolute()

    def committed(self, checkpoint: Checkpoint) -> None:
        """Record a new checkpoint, and reset the count of restart attempts."""
        self.checkpoint = self.written = checkpoint
        self._worker_group.restarts.progressed()

    def progressed(self) -> None:
        """Reset the count of restart attempts, because the group has made progress."""
        self._worker_group.restarts.progressed()

    def began_from(self, checkpoint: Checkpoint | None) -> None:
        """Record that the roles were restored from a checkpoint, or constructed anew (None)."""
        self.checkpoint = checkpoint
        self._restored = None if checkpoint is None else checkpoint.tag
        self._began = None if checkpoint is None else checkpoint.identity
        self.written = None

    @property
    def restarts(self) -> int:
        """The maximal number of restarts without a new checkpoint in between; 0 if the group never restarts."""
        return self._worker_group.restarts.limit

    @property
    def is_current(self) -> bool:
        """Whether the roles started from the checkpoint that is now the last one."""
        return self._began == (None if self.checkpoint is None else self.checkpoint.identity)

    def moved(self, before: Path, after: Path) -> None:
        """Update the path of the last checkpoint after a folder was renamed."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(before):
            folder = after / self.checkpoint.folder.relative_to(before)
            self.checkpoint = self.written = attrs.evolve(self.checkpoint, folder=folder)

    def lost(self, folder: Path, before: Checkpoint | None) -> None:
        """Make `before` the last checkpoint again if the lost folder contained the current one."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(folder):
            self.checkpoint, self.written = before, None

    def raise_unasked(self) -> None:
        """Raise the error of the last checkpoint begun with `wait=False`, unless a caller has seen that error."""
        saving, self.saving = self.saving, None
        if saving is not None and (error := saving.unreported_failure()) is not None:
            error.add_note(f"that was {saving.label} of group {self._worker_group.name!r}; another one wasn't begun")
            raise error

    # -- for users

    def write(self, folder: Path, tag: Tag) -> None:
        """Write a checkpoint; see `ColocatedGroup.checkpoint`."""
        write(self._worker_group, folder, tag)

    def begin(self, folder: Path, tag: Tag) -> Saving:
        """Begin a checkpoint with `wait=False`; see `ColocatedGroup.checkpoint`."""
        return begin(self._worker_group, folder, tag)

    def restore(self, folder: Path) -> Tag:
        """Restore the roles; see `ColocatedGroup.restore`."""
        return restore(self._worker_group, folder)

    def resize(self, timeout: float | None) -> int:
        """Resize the group; see `ColocatedGroup.resize`."""
        return resize(self._worker_group, timeout)


def checkpoints_of(worker_group: WorkerGroup) -> CheckpointsOfGroup:
    """Return the driver's half of a group's checkpoints."""
    return cast("CheckpointsOfGroup", worker_group.part("checkpoints"))


def write(worker_group: WorkerGroup, folder: Path, tag: Tag) -> None:
    """Save all roles of a group, between the group's calls. A later restart restores from this checkpoint.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or no role has both; or the folder may not be
            replaced, or the tag is no text or number.
        RoleError: A `save` raised, or the future that it returned failed, or a file is incomplete after both; or an
            earlier call with a kept result has failed, unreported; or the previous checkpoint has failed, unreported.
            Then there is no new checkpoint, and the earlier one stays.
    """
    with _begun(worker_group, folder, tag, wait=True) as complete:
        complete()
    worker_group.home.changed()


def begin(worker_group: WorkerGroup, folder: Path, tag: Tag) -> Saving:
    """Start a checkpoint, and return when all roles have copied their states. Files are written while calls run."""
    saving = Saving(worker_group, tag, folder.absolute())
    begun = _begun(worker_group, folder, tag, wait=False)
    complete = begun.__enter__()
    try:
        checkpoints_of(worker_group).saving = saving
        name = f"colocate-checkpoint-{worker_group.name}"
        Thread(target=_go_on, args=(worker_group, saving, begun, complete), name=name).start()
    except BaseException as error:  # No thread could be started.
        checkpoints_of(worker_group).saving = None
        begun.__exit__(type(error), error, error.__traceback__)
        raise
    return saving


def _go_on(
    worker_group: WorkerGroup,
    saving: Saving,
    begun: contextlib.AbstractContextManager[object],
    complete: Callable[[], None],
) -> None:
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
    """A context manager that makes a checkpoint: the yielded function writes the record, and leaving the block commits.

    All roles have taken their states when the block is entered. The block may be left on another thread.
    """
    if not isinstance(tag, str | int | float):
        raise ConfigError(f"checkpoint(tag) must be text, a number or None, not {shown(tag)}")
    saved = savable(worker_group.roles)
    folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()  # The rename needs a name.
    checkpoint = Checkpoint(folder, tag, uuid.uuid4().hex)
    with checkpoints_of(worker_group).writing:  # Hold the lock until the checkpoint is committed.
        checkpoints_of(worker_group).raise_unasked()
        _refuse_forgotten(worker_group)
        with nobody_renames(folder):
            refuse_others(folder, saved)
        worker_group.residents.raise_untold()
        generation, saves = worker_group.generation, checkpoints_of(worker_group).saves
        with atomic_folder(folder, _committing(worker_group, checkpoint, saved, saves, wait)) as part:
            began = time.time()
            for name in saved:
                (part / name).mkdir()

            def save_parts() -> None:
                for name, half in worker_group.parts.items():
                    if (checkpoint_record := half.saved()) is not None:
                        checkpoint.parts[name] = checkpoint_record

            is_left = any(_submit(worker_group, part, then=save_parts, wait=wait).result())
            taken_at = time.time()
            worker_group.residents.raise_untold()

            files: dict[str, tuple[int, str]] = {}

            def complete() -> None:
                if is_left:
                    saves.finish(part)
                _refuse_fixed(worker_group, part, saved)
                files.update(_looked_at(worker_group.name, saves, part, saved))
                record = {
                    "id": checkpoint.identity,
                    "tag": tag,
                    "group": worker_group.name,
                    "generation": generation,
                    "roles": {
                        name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                    },
                    "stood in": [name for name, info in worker_group.roles.items() if info.stands_in],
                    "parts": checkpoint.parts,
                    "files": files,
                    "colocate": __version__,
                }
                (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

            yield complete
        nbytes = sum(size for size, _ in files.values())
        checkpoint_record = CheckpointRecord(worker_group.name, tag, folder, nbytes, began, taken_at, time.time())
        worker_group.services.tell("colocate_group_checkpointed", checkpoint_record)


def _refuse_fixed(worker_group: WorkerGroup, part: Path, saved: Mapping[str, RoleInfo]) -> None:
    """Refuse a checkpoint that needs the same number of ranks to restore, if a restart may change that number.

    Raises:
        RoleError: A role's files are of that kind.
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
    """Return the size and digest of each file that a group has written, by name, after checks by the workers.

    Raises:
        RoleError: A file is missing, or still being written.
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
        if not (does_nothing(info.cls) or any(file_name.startswith(f"{name}/") for file_name in before)):
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
    """Restore the roles of a group from a checkpoint, between calls. Later restarts use this checkpoint, too.

    Raises:
        ConfigError: The folder has no checkpoint for this group.
        RoleError: A `restore` raised, or another checkpoint has meanwhile replaced this one. Some roles may be restored
            then, others unchanged.
    """
    with checkpoints_of(worker_group).writing:
        checkpoint, generation = Checkpoint.read(folder.absolute(), worker_group.roles), worker_group.generation
        _submit(worker_group, checkpoint.folder, RESTORE, identity=checkpoint.identity).result()
        with worker_group.order.lock:
            worker_group.check()
            if worker_group.generation != generation:
                raise ColocateError(
                    f"group {worker_group.name!r} was restarted while {checkpoint.tag!r} was restored: that is void"
                )
            checkpoints_of(worker_group).began_from(checkpoint)
            for name in {*worker_group.parts, *checkpoint.parts}:
                worker_group.part(name).restored(checkpoint.parts.get(name))
    worker_group.home.changed()
    return checkpoint.tag


def _refuse_forgotten(worker_group: WorkerGroup) -> None:
    """Refuse a checkpoint if the run was resumed and this group's earlier checkpoint was never restored."""
    folder = worker_group.services.resumed.get(worker_group.name)
    if folder is not None and checkpoints_of(worker_group).checkpoint is None:
        raise ConfigError(
            f"group {worker_group.name!r} has begun anew, though the run was resumed and has a checkpoint of it in "
            f"{folder}: call group.restore(folder) with that folder (it lies in run.resumed), or pass "
            "spawn(restore=folder). A group that is meant to begin anew needs another name"
        )


@contextlib.contextmanager
def _committing(
    worker_group: WorkerGroup, checkpoint: Checkpoint, saved: Collection[str], saves: Saves, wait: bool
) -> Iterator[None]:
    """A context manager that holds the group's lock around the commit, so that no restart runs during the rename.

    With `wait=False`, the commit also works while the group is closing, as long as the close waits for it.
    """
    with worker_group.order.lock:
        if wait or worker_group.alive:
            worker_group.check()
        saves.check()  # This raises if the workers that wrote the checkpoint have failed since.
        refuse_others(checkpoint.folder, saved)  # Check again, because files may have been added meanwhile.
        yield
        checkpoints_of(worker_group).committed(checkpoint)


def _submit(
    worker_group: WorkerGroup,
    folder: Path,
    what: str = CHECKPOINT,
    then: Callable[[], object] = lambda: None,
    **more: Any,
) -> PendingCall:
    given = {"directory": str(folder), **more}
    draft = for_all(worker_group, what, what, CheckpointsOfWorker.calls[what], given)
    send_now(draft, then)
    return draft.call


def resize(worker_group: WorkerGroup, timeout: float | None) -> int:
    """Restart a group from the last checkpoint if more slots are available, and return the new number of slots.

    Raises:
        ConfigError: The group doesn't restart, or has no checkpoint.
        ColocateError: Calls are pending.
        TimeoutError: The group isn't ready yet.
    """
    name, restarts, checkpoints = worker_group.name, worker_group.restarts, checkpoints_of(worker_group)
    if not restarts.limit:
        raise ConfigError(f"group {name!r} can't be resized: that is a restart, and it has on_failure='fail'")
    if has_more(worker_group):
        if checkpoints.checkpoint is None:
            raise ConfigError(f"group {name!r} can't be resized: there is no checkpoint to go on from; make one before")
        with checkpoints.writing:  # This waits for a checkpoint in progress.
            if pending := list(worker_group.order.pending.values()):
                labels = ", ".join(dict.fromkeys(call.label for call in pending))
                raise ColocateError(f"group {name!r} can't be resized while calls are pending: {labels}")
            begin_resize(worker_group)
        restarts.wait(timeout)
    return worker_group.size


def has_more(worker_group: WorkerGroup) -> bool:
    """Return whether a group can get more slots than now. This tries to reserve lost slots again."""
    has = worker_group.size
    return has < len(worker_group.whole) and worker_group.home.regrow(worker_group) > has


def begin_resize(worker_group: WorkerGroup) -> ColocateError | None:
    """Start to restart a group with all available slots, and return the error that callers get in the meantime."""
    worker_group.restarts.progressed()  # A resize must not count as a failed attempt to restart.
    name = worker_group.name
    worker_group.fail(ColocateError(f"group {name!r} is resized: there are more slots for it", group=name))
    return worker_group.life.told()
