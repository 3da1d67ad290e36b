"""A worker's share of a checkpoint: calls `save` and `restore` of roles, and stores the states of random generators.

Each role has one folder for all its ranks, and colocate's own files have a separate folder. A checkpoint has an
identity, so that all ranks restore the same checkpoint even if another one is meanwhile written to the folder.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from colocate._role.context import derive_seed, running_call
from colocate._role.method import RoleMethod
from colocate._system.files import get_places, read_json
from colocate.errors import ColocateError
from colocate.features import FEATURES
from colocate.features.checkpoints.contents import check_unchanged
from colocate.features.checkpoints.saver import UnfinishedSave
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.failure import add_note
from colocate.worker.serving.over import is_future
from colocate.worker.serving.role_instance import RoleInstance

RECORD = "checkpoint.json"  # Only the folder of a complete checkpoint has this file.
RANK_FOLDER = ".colocate"


def save_roles(
    roles: Sequence[RoleInstance],
    directory: str,
    awake: Callable[[RoleInstance], AbstractContextManager[object]],
    wait: bool,
    parts: Mapping[str, WorkerFeature],
) -> list[UnfinishedSave]:
    """Take the states of all roles, and return the remaining work. With `wait`, begin to write files.

    Raises:
        ColocateError: The folder isn't visible on this machine.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ColocateError(
            f"the checkpoint's folder {folder} isn't there on this machine: it has to lie on a file system that the "
            "driver and all workers share"
        )
    halves = []
    for role in roles:
        with awake(role):
            half = _call_save(role, folder)
            if half is not None and (role.run_code(half.run_next_part) if wait else half.has_more()):
                halves.append(half)
        for name, part in parts.items():
            if (state := part.save_state(role)) is not None:
                _write_rank_file(role, folder, name, state.encode())
        if (call := running_call.get()) is not None:
            calls = json.dumps([role.ctx.calls_before + call.seq, role.ctx._calls])
            _write_rank_file(role, folder, "calls", calls.encode())
        if (generator := role.ctx._generator) is not None:
            _write_rank_file(role, folder, "generator", generator.get_state().numpy().tobytes())
        if role.role_state is not None and (wide := role.setting.process_state) is not None:
            _write_rank_file(role, folder, "defaults", json.dumps(wide.save_generators(role.role_state)).encode())
    return halves


def restore_role(worker_context: WorkerContext, role: RoleInstance, directory: str, identity: str) -> None:
    """Restore a role from a checkpoint. A role without `save` stays as constructed.

    Raises:
        ColocateError: The checkpoint isn't visible on this machine, was replaced by another one, or is damaged.
    """
    # Try both possible paths twice, because a rename may be replacing the checkpoint just now.
    folder = next((place for place in get_places(Path(directory)) * 2 if _exists(place, identity)), None)
    if folder is None:
        try:
            read_checkpoint(Path(directory))
        except (OSError, ValueError):
            raise ColocateError(
                f"the checkpoint {directory} isn't there, as this machine sees it: it was removed or renamed, or it "
                "doesn't lie on a file system that the driver and all workers share"
            ) from None
        raise _replaced_error(Path(directory))
    files: dict[str, Any] = {}
    try:
        files = _list_role_files(role, folder)
        # Each rank checks only a share of the files.
        check_unchanged(folder, dict([*files.items()][role.ctx.rank :: role.ctx.world_size]))
        restored = _call_restore(role, folder)
        # A rank without files in the checkpoint takes rank 0's counters and feature states, and a new random seed.
        file, first = (_rank_file(role, folder, "calls", rank) for rank in (role.ctx.rank, 0))
        is_new = first.exists() and not file.exists()
        file = first if is_new else file
        if file.exists():
            role.ctx.calls_before, role.ctx._calls = read_json(file)
        own_files = {name: _rank_file(role, folder, name, rank=0 if is_new else None) for name in FEATURES}
        for name, file in own_files.items():
            if file.exists() or name in worker_context.parts:
                text = file.read_text(encoding="utf-8") if file.exists() else None
                worker_context.get_feature(name).load_state(role, text, restored)
        file = _rank_file(role, folder, "generator")
        if is_new and _rank_file(role, folder, "generator", rank=0).exists():
            role.ctx.generator.manual_seed(derive_seed(role.ctx.seed, "resized", role.name, role.ctx.calls_before))
        elif file.exists():
            import torch

            state = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            role.ctx.generator.set_state(state)
        file = _rank_file(role, folder, "defaults")
        if role.role_state is not None and (wide := role.setting.process_state) is not None and file.exists():
            wide.restore_generators(role.role_state, read_json(file))
    except Exception as error:
        if not _exists(folder, identity):
            raise _replaced_error(Path(directory)) from error
        check_unchanged(folder, files, error)  # This raises if any of the role's files is damaged.
        add_note(error, f"role {role.name!r} was being restored from {folder}")
        raise
    if not _exists(folder, identity):  # The files that were read may be from two checkpoints.
        raise _replaced_error(Path(directory))


def _list_role_files(role: RoleInstance, folder: Path) -> dict[str, Any]:
    prefixes = f"{role.name}/", str(_rank_file(role, Path(), ""))
    return {name: entry for name, entry in _read_record(folder)["files"].items() if name.startswith(prefixes)}


def read_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path where a checkpoint currently is, and the checkpoint's record.

    Raises:
        FileNotFoundError: There is no checkpoint.
        OSError: The record can't be read.
        ValueError: The record isn't JSON.
    """
    for place in get_places(folder) * 2:  # Try both paths twice, because a rename may be replacing the checkpoint.
        try:
            return place, _read_record(place)
        except FileNotFoundError:
            pass
    raise FileNotFoundError(f"there is no {RECORD} in {folder}")


def checkpoint_identity(record: Mapping[str, Any]) -> str:
    """Return the checkpoint's identity, as contained in the checkpoint's record."""
    return str(record["id"])


def _exists(place: Path, identity: str) -> bool:
    try:
        return checkpoint_identity(_read_record(place)) == identity
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replaced_error(folder: Path) -> ColocateError:
    try:
        record = read_checkpoint(folder)[1]
        now = f"{record['tag']!r} of group {record['group']!r}"
    except (OSError, ValueError, KeyError, TypeError):
        now = "nothing that is complete"
    return ColocateError(
        f"the checkpoint that was to be restored from {folder} isn't there any more: another one has taken its place "
        f"(now there is {now}), and ranks don't go on from different ones. Restore once more to go on from that; a "
        "group that is to come back by itself needs a folder that nobody else writes to"
    )


def find_hook(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the plain function of a class's `save` or `restore`, even if a `@method`; None if there is none."""
    attribute = getattr(cls, name, None)
    return attribute.spec.function if isinstance(attribute, RoleMethod) else attribute if callable(attribute) else None


def accepts_ranks(cls: type) -> bool:
    """Return whether a role's `restore` has the parameter `ranks`, the number of ranks that saved the role."""
    restore = find_hook(cls, "restore")
    return restore is not None and "ranks" in inspect.signature(restore).parameters


def _call_save(role: RoleInstance, folder: Path) -> UnfinishedSave | None:
    assert role.name is not None
    role_folder = folder / role.name
    if not role_folder.is_dir() or role.is_substitute:
        return None
    half, had = UnfinishedSave(role), {**getattr(role.instance, "__dict__", {})}
    role.run_hook(_bind_hook(role, "save"), str(role_folder), name="save", by=half.take_state)
    has = getattr(role.instance, "__dict__", {}).items()
    # As in torch's recipe for async saves, `save` may store a future in an attribute of the role.
    half.add_background([value for key, value in has if value is not had.get(key) and is_future(value)])
    return half


def _call_restore(role: RoleInstance, folder: Path) -> bool:
    """Call a role's `restore` if the checkpoint has a state of the role, and return whether `restore` was called."""
    assert role.name is not None
    role_folder = folder / role.name
    if not role_folder.is_dir() or role.is_substitute:
        return False
    ranks = _read_record(folder)["roles"][role.name]["ranks"]
    more = {"ranks": ranks} if accepts_ranks(type(role.instance)) else {}
    role.run_hook(partial(_bind_hook(role, "restore"), **more), str(role_folder), name="restore")
    return True


def _bind_hook(role: RoleInstance, name: str) -> Callable[..., Any]:
    attribute = getattr(type(role.instance), name)
    bound = MethodType(attribute.spec.function, role.instance) if isinstance(attribute, RoleMethod) else None
    return bound or getattr(role.instance, name)


def _read_record(place: Path) -> Any:
    return read_json(place / RECORD)


def _write_rank_file(role: RoleInstance, folder: Path, what: str, data: bytes) -> None:
    path = _rank_file(role, folder, what)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def _rank_file(role: RoleInstance, folder: Path, what: str, rank: int | None = None) -> Path:
    return folder / RANK_FOLDER / f"{role.name}-{role.ctx.rank if rank is None else rank}.{what}"
