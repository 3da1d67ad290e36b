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
from colocate._system.files import atomic_folder, lock_names
from colocate._system.limits import AFTER_FORCE_S
from colocate._system.numbers import format_value
from colocate._system.threads import Thread
from colocate._version import __version__
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ClosedError, ColocateError, ConfigError, RoleError
from colocate.features.checkpoints.checkpoint import (
    Checkpoint,
    Tag,
    accepts_other_ranks,
    check_replaceable,
    has_empty_save,
    select_savable,
)
from colocate.features.checkpoints.contents import read_sizes
from colocate.features.checkpoints.messages import CHECKPOINT, RESTORE, SavedState
from colocate.features.checkpoints.saving import SaveRequests, Saving
from colocate.features.checkpoints.share import RECORD
from colocate.features.checkpoints.worker import CheckpointsOfWorker


class CheckpointsOfGroup(GroupFeature):
    """The driver's half of a group's checkpoints: the last checkpoint, and the checkpoint in progress.

    Attributes:
        checkpoint: The last checkpoint, from which a restart restores; None before the first.
        written: The last checkpoint that was made since the roles started; None for none.
        saving: The last checkpoint begun with `wait=False`, perhaps still in progress.
        saves: The requests to the workers of this generation.
        write_lock: A lock, held while a checkpoint is written, so that names are assigned in the order of the states.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.checkpoint: Checkpoint | None = None
        self.written: Checkpoint | None = None
        self.saving: Saving | None = None
        self.saves = SaveRequests(worker_group)
        self.write_lock = threading.Lock()
        self._restored_tag: Tag = None  # The tag of the restored checkpoint.
        self._restored_id: str | None = None  # The identity of the restored checkpoint.
        self._start_folder: Path | None = None  # The folder to restore from at the first start; None afterwards.

    # -- hooks

    def ready_configs(self) -> tuple[str, str] | None:
        """Return the folder and identity of the checkpoint to restore the roles from; None without a checkpoint."""
        group, checkpoint = self._worker_group, self.checkpoint
        if self._start_folder is not None:
            checkpoint, self._start_folder = Checkpoint.from_folder(self._start_folder, group.roles), None
        elif checkpoint is not None and group.may_resize:
            Checkpoint.from_folder(checkpoint.folder, group.roles)  # This raises if the roles can't be restored.
        self.set_restored(checkpoint)
        for name, saved in () if checkpoint is None else checkpoint.parts.items():
            group.get_part(name).load_state(saved)
        return None if checkpoint is None else (str(checkpoint.folder), checkpoint.identity)

    def source(self) -> str | None:
        """Return words that name the last checkpoint, for messages; None without a checkpoint."""
        return None if self.checkpoint is None else f"its checkpoint {self.checkpoint.tag!r}"

    def tag(self) -> Tag:
        """Return the tag of the checkpoint that the roles were restored from."""
        return self._restored_tag

    def on_restarted(self) -> None:
        """Create a new `SaveRequests` after a restart, because the workers are new."""
        self.saves = SaveRequests(self._worker_group)

    def on_failed(self, error: ColocateError) -> None:
        """Mark a checkpoint in progress as void, and fail pending requests."""
        if self._worker_group.closed_by is None and self.saving is not None and not self.saving.done():
            self.saving.is_void = True
        self.saves.fail_requests(error)

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Pass a worker's answer to the pending request."""
        assert isinstance(message, SavedState)
        self.saves.on_answer(worker, message, body)

    def background_work(self) -> str | None:
        """Return the label of the checkpoint that is being written; None if there is none."""
        return None if self.saving is None or self.saving.done() else self.saving.label

    def finish_background(self, grace: float) -> Sequence[BaseException]:
        """Wait up to `grace` seconds for a checkpoint in progress, and return the error that no caller has seen."""
        saving, group = self.saving, self._worker_group
        if saving is None:
            return []
        if not saving.done():
            deadline = Deadline(grace)
            if group.life.failure is None:
                group.send(group.live_slots(), to_worker.Stop())  # This tells running calls that the group is closing.
            group.workforce.wind_down(grace, deadline)
            saving._add_callback(lambda _: group.workforce.stages.wake_waiters())
            group.workforce.stages.wait_until(lambda: group.is_hurried or saving.done(), group.workforce.overdue)
            late = ClosedError(
                f"{saving.label} of group {group.name!r} wasn't all written {grace:g} s after the group was closed by "
                f"{group.closed_by}: it is void, and an earlier one stays. Wait for its result() before, or give "
                "close(grace=...) as long as it takes",
                closed_by=group.closed_by,
            )
            self.saves.fail_requests(late)
            if not saving.wait(AFTER_FORCE_S):  # The thread that writes the checkpoint may notice the failure late.
                return [late]
        error = saving.unreported_failure()
        return [] if error is None else [error]

    def handover_state(self) -> tuple[Checkpoint | None, Tag] | None:
        """Return the last checkpoint and the tag of the restored one, for the group's next driver."""
        return None if self.checkpoint is None and self._restored_tag is None else (self.checkpoint, self._restored_tag)

    def resume_handover(self, kept: tuple[Checkpoint | None, Tag]) -> None:
        """Adopt the checkpoint and tag that the earlier driver's `handover_state` has returned."""
        self.checkpoint, self._restored_tag = kept

    # -- state

    def set_start_folder(self, folder: Path) -> None:
        """Set the checkpoint that the group restores from at the first start.

        Raises:
            ConfigError: The folder has no checkpoint for this group.
        """
        Checkpoint.from_folder(folder.absolute(), self._worker_group.roles)  # This raises before any worker is started.
        self._start_folder = folder.absolute()

    def on_committed(self, checkpoint: Checkpoint) -> None:
        """Record a new checkpoint, and reset the count of restart attempts."""
        self.checkpoint = self.written = checkpoint
        self._worker_group.restarts.reset_attempts()

    def on_progress(self) -> None:
        """Reset the count of restart attempts, because the group has made progress."""
        self._worker_group.restarts.reset_attempts()

    def set_restored(self, checkpoint: Checkpoint | None) -> None:
        """Record the checkpoint from which the roles were restored; None if the roles were constructed anew."""
        self.checkpoint = checkpoint
        self._restored_tag = None if checkpoint is None else checkpoint.tag
        self._restored_id = None if checkpoint is None else checkpoint.identity
        self.written = None

    @property
    def max_restarts(self) -> int:
        """The maximal number of restarts without a new checkpoint in between; 0 if the group never restarts."""
        return self._worker_group.restarts.limit

    @property
    def is_current(self) -> bool:
        """Whether the roles started from the checkpoint that is now the last one."""
        return self._restored_id == (None if self.checkpoint is None else self.checkpoint.identity)

    def on_folder_moved(self, before: Path, after: Path) -> None:
        """Update the path of the last checkpoint after a folder was renamed."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(before):
            folder = after / self.checkpoint.folder.relative_to(before)
            self.checkpoint = self.written = attrs.evolve(self.checkpoint, folder=folder)

    def on_folder_lost(self, folder: Path, before: Checkpoint | None) -> None:
        """Make `before` the last checkpoint again if the newer checkpoint was in the lost folder."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(folder):
            self.checkpoint, self.written = before, None

    def raise_unreported(self) -> None:
        """Raise the error of the last checkpoint begun with `wait=False`, unless a caller has seen that error."""
        saving, self.saving = self.saving, None
        if saving is not None and (error := saving.unreported_failure()) is not None:
            error.add_note(f"that was {saving.label} of group {self._worker_group.name!r}; another one wasn't begun")
            raise error

    # -- for users

    def write_checkpoint(self, folder: Path, tag: Tag) -> None:
        """Write a checkpoint; see `ColocatedGroup.checkpoint`."""
        write_checkpoint(self._worker_group, folder, tag)

    def start_checkpoint(self, folder: Path, tag: Tag) -> Saving:
        """Begin a checkpoint with `wait=False`; see `ColocatedGroup.checkpoint`."""
        return start_checkpoint(self._worker_group, folder, tag)

    def restore_checkpoint(self, folder: Path) -> Tag:
        """Restore the roles; see `ColocatedGroup.restore`."""
        return restore_checkpoint(self._worker_group, folder)

    def resize_group(self, timeout: float | None) -> int:
        """Resize the group; see `ColocatedGroup.resize`."""
        return resize_group(self._worker_group, timeout)


def get_checkpoints(worker_group: WorkerGroup) -> CheckpointsOfGroup:
    """Return the driver's half of a group's checkpoints."""
    return cast("CheckpointsOfGroup", worker_group.get_part("checkpoints"))


def write_checkpoint(worker_group: WorkerGroup, folder: Path, tag: Tag) -> None:
    """Save all roles of a group, between the group's calls. A later restart restores from this checkpoint.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or no role has both; or the folder may not be
            replaced, or the tag is no text or number.
        RoleError: A `save` raised, or the future that it returned failed, or a file is incomplete after both; or an
            earlier call with a kept result has failed, unreported; or the previous checkpoint has failed, unreported.
            Then there is no new checkpoint, and the earlier one stays.
    """
    with _prepare_checkpoint(worker_group, folder, tag, wait=True) as complete:
        complete()
    worker_group.home.on_groups_changed()


def start_checkpoint(worker_group: WorkerGroup, folder: Path, tag: Tag) -> Saving:
    """Start a checkpoint, and return when all roles have copied their states. Files are written while calls run."""
    saving = Saving(worker_group, tag, folder.absolute())
    begun = _prepare_checkpoint(worker_group, folder, tag, wait=False)
    complete = begun.__enter__()
    try:
        get_checkpoints(worker_group).saving = saving
        name = f"colocate-checkpoint-{worker_group.name}"
        Thread(target=_finish_checkpoint, args=(worker_group, saving, begun, complete), name=name).start()
    except BaseException as error:  # No thread could be started.
        get_checkpoints(worker_group).saving = None
        begun.__exit__(type(error), error, error.__traceback__)
        raise
    return saving


def _finish_checkpoint(
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
        worker_group.home.on_groups_changed()
    except BaseException as error:
        saving._set_error(error)
    else:
        saving._set_result(None)


@contextlib.contextmanager
def _prepare_checkpoint(worker_group: WorkerGroup, folder: Path, tag: Tag, wait: bool) -> Iterator[Callable[[], None]]:
    """A context manager that makes a checkpoint: the yielded function writes the record, and leaving the block commits.

    All roles have taken their states when the block is entered. The block may be left on another thread.
    """
    if not isinstance(tag, str | int | float):
        raise ConfigError(f"checkpoint(tag) must be text, a number or None, not {format_value(tag)}")
    saved = select_savable(worker_group.roles)
    # The commit renames a folder to this path, so the path must end with a name.
    folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()
    checkpoint = Checkpoint(folder, tag, uuid.uuid4().hex)
    with get_checkpoints(worker_group).write_lock:  # Hold the lock until the checkpoint is committed.
        get_checkpoints(worker_group).raise_unreported()
        _check_resumed(worker_group)
        with lock_names(folder):
            check_replaceable(folder, saved)
        worker_group.residents.raise_unreported()
        generation, saves = worker_group.generation, get_checkpoints(worker_group).saves
        with atomic_folder(folder, _guard_commit(worker_group, checkpoint, saved, saves, wait)) as part:
            began = time.time()
            for name in saved:
                (part / name).mkdir()

            def save_parts() -> None:
                for name, half in worker_group.parts.items():
                    if (checkpoint_record := half.save_state()) is not None:
                        checkpoint.parts[name] = checkpoint_record

            is_left = any(_submit(worker_group, part, then=save_parts, wait=wait).result())
            taken_at = time.time()
            worker_group.residents.raise_unreported()

            files: dict[str, tuple[int, str]] = {}

            def complete() -> None:
                if is_left:
                    saves.finish_saves(part)
                _check_resizable(worker_group, part, saved)
                files.update(_inspect_files(worker_group.name, saves, part, saved))
                record = {
                    "id": checkpoint.identity,
                    "tag": tag,
                    "group": worker_group.name,
                    "generation": generation,
                    "roles": {
                        name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                    },
                    "stood in": [name for name, info in worker_group.roles.items() if info.is_substituted],
                    "parts": checkpoint.parts,
                    "files": files,
                    "colocate": __version__,
                }
                (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

            yield complete
        nbytes = sum(size for size, _ in files.values())
        checkpoint_record = CheckpointRecord(worker_group.name, tag, folder, nbytes, began, taken_at, time.time())
        worker_group.services.notify_observers("colocate_group_checkpointed", checkpoint_record)


def _check_resizable(worker_group: WorkerGroup, part: Path, saved: Mapping[str, RoleInfo]) -> None:
    """Refuse a checkpoint that needs the same number of ranks to restore, if a restart may change that number.

    Raises:
        RoleError: A role's files are of that kind.
    """
    for name, info in saved.items() if worker_group.may_resize else ():
        if not accepts_other_ranks(info.cls, part / name) and not has_empty_save(info.cls):
            raise RoleError(
                f"group {worker_group.name!r} may have {worker_group.home.least} to "
                f"{len(worker_group.all_indices)} slots, "
                f"and what {name}.save() writes can be restored by {len(info.slots)} ranks alone: write it by "
                "torch.distributed.checkpoint, or have restore(directory, ranks), which is told how many have saved",
                group=worker_group.name,
                role=name,
                method="save",
            )


def _inspect_files(
    group: str, saves: SaveRequests, part: Path, saved: Mapping[str, RoleInfo]
) -> dict[str, tuple[int, str]]:
    """Check that a group's files are complete, and return the size and digest of each file, by name.

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

    before = read_sizes(part)
    for name, info in saved.items():
        if not (has_empty_save(info.cls) or any(file_name.startswith(f"{name}/") for file_name in before)):
            refuse(name, "there is no file in its folder. (A role without a state has no save() and restore().)")
    for name in before:
        if name.endswith(".distcp") and f"{name.rpartition('/')[0]}/.metadata" not in before:
            refuse(name, f"torch.distributed.checkpoint has written {name}, and no .metadata beside it")
    being_written, digests = saves.inspect_files(part, [*before])
    for name in being_written:
        refuse(name, f"{name} is open there, to be written")
    after = read_sizes(part)
    for name in sorted({name for name, _ in before.items() ^ after.items()}):
        refuse(name, f"{name} has changed since")
    return {name: (size, digests[name]) for name, (size, _) in after.items()}


def restore_checkpoint(worker_group: WorkerGroup, folder: Path) -> Tag:
    """Restore the roles of a group from a checkpoint, between calls. Later restarts use this checkpoint, too.

    Raises:
        ConfigError: The folder has no checkpoint for this group.
        RoleError: A `restore` raised, or another checkpoint has meanwhile replaced this one. Some roles may be restored
            then, others unchanged.
    """
    with get_checkpoints(worker_group).write_lock:
        checkpoint, generation = Checkpoint.from_folder(folder.absolute(), worker_group.roles), worker_group.generation
        _submit(worker_group, checkpoint.folder, RESTORE, identity=checkpoint.identity).result()
        with worker_group.order.lock:
            worker_group.check_usable()
            if worker_group.generation != generation:
                raise ColocateError(
                    f"group {worker_group.name!r} was restarted while {checkpoint.tag!r} was restored: that is void"
                )
            get_checkpoints(worker_group).set_restored(checkpoint)
            for name in {*worker_group.parts, *checkpoint.parts}:
                worker_group.get_part(name).load_state(checkpoint.parts.get(name))
    worker_group.home.on_groups_changed()
    return checkpoint.tag


def _check_resumed(worker_group: WorkerGroup) -> None:
    """Refuse a checkpoint if the run was resumed and this group's earlier checkpoint was never restored."""
    folder = worker_group.services.resumed.get(worker_group.name)
    if folder is not None and get_checkpoints(worker_group).checkpoint is None:
        raise ConfigError(
            f"group {worker_group.name!r} wasn't restored, though the resumed run has a checkpoint of this group in "
            f"{folder}: call group.restore(folder) with that folder (in run.resumed), or pass spawn(restore=folder). "
            "To start the group from scratch, give it another name"
        )


@contextlib.contextmanager
def _guard_commit(
    worker_group: WorkerGroup, checkpoint: Checkpoint, saved: Collection[str], saves: SaveRequests, wait: bool
) -> Iterator[None]:
    """A context manager that holds the group's lock around the commit, so that no restart runs during the rename.

    With `wait=False`, the commit also works while the group is closing, as long as the close waits for it.
    """
    with worker_group.order.lock:
        if wait or worker_group.alive:
            worker_group.check_usable()
        saves.check_failure()  # This raises if the workers that wrote the checkpoint have failed since.
        # Check again, because files may have been added since the first check.
        check_replaceable(checkpoint.folder, saved)
        yield
        get_checkpoints(worker_group).on_committed(checkpoint)


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


def resize_group(worker_group: WorkerGroup, timeout: float | None) -> int:
    """Restart a group from the last checkpoint if more slots are available, and return the new number of slots.

    Raises:
        ConfigError: The group doesn't restart, or has no checkpoint.
        ColocateError: Calls are pending.
        TimeoutError: The group isn't ready yet.
    """
    name, restarts, checkpoints = worker_group.name, worker_group.restarts, get_checkpoints(worker_group)
    if not restarts.limit:
        raise ConfigError(f"group {name!r} can't be resized: that is a restart, and it has on_failure='fail'")
    if has_more_slots(worker_group):
        if checkpoints.checkpoint is None:
            raise ConfigError(f"group {name!r} can't be resized: there is no checkpoint to go on from; make one before")
        with checkpoints.write_lock:  # This waits for a checkpoint in progress.
            if pending := list(worker_group.order.pending.values()):
                labels = ", ".join(dict.fromkeys(call.label for call in pending))
                raise ColocateError(f"group {name!r} can't be resized while calls are pending: {labels}")
            start_resize(worker_group)
        restarts.wait_ready(timeout)
    return worker_group.size


def has_more_slots(worker_group: WorkerGroup) -> bool:
    """Return whether a group can get more slots than now. This tries to reserve lost slots again."""
    has = worker_group.size
    return has < len(worker_group.all_indices) and worker_group.home.count_slots_now(worker_group) > has


def start_resize(worker_group: WorkerGroup) -> ColocateError | None:
    """Start to restart a group with all available slots, and return the error that callers get in the meantime."""
    worker_group.restarts.reset_attempts()  # A resize must not count as a failed attempt to restart.
    name = worker_group.name
    worker_group.fail_group(ColocateError(f"group {name!r} is resized: there are more slots for it", group=name))
    return worker_group.life.take_failure()
