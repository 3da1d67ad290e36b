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
from colocate._system.files import json_of, places
from colocate.errors import ColocateError
from colocate.features import FEATURES
from colocate.features.checkpoints.contents import refuse_changed
from colocate.features.checkpoints.saver import SecondHalf
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.failure import note
from colocate.worker.serving.over import is_future
from colocate.worker.serving.role_instance import RoleInstance

RECORD = "checkpoint.json"  # Only the folder of a complete checkpoint has this file.
OWN = ".colocate"


def save(
    roles: Sequence[RoleInstance],
    directory: str,
    awake: Callable[[RoleInstance], AbstractContextManager[object]],
    wait: bool,
    parts: Mapping[str, OfWorker],
) -> list[SecondHalf]:
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
            half = _save(role, folder)
            if half is not None and (role.run(half.go_on) if wait else half.is_left()):
                halves.append(half)
        for name, part in parts.items():
            if (state := part.saved(role)) is not None:
                _write_own(role, folder, name, state.encode())
        if (call := running_call.get()) is not None:
            calls = json.dumps([role.ctx.calls_before + call.seq, role.ctx._calls])
            _write_own(role, folder, "calls", calls.encode())
        if (generator := role.ctx._generator) is not None:
            _write_own(role, folder, "generator", generator.get_state().numpy().tobytes())
        if role.own is not None and (wide := role.setting.process_wide) is not None:
            _write_own(role, folder, "defaults", json.dumps(wide.saved(role.own)).encode())
    return halves


def restore(worker_context: WorkerContext, role: RoleInstance, directory: str, identity: str) -> None:
    """Restore a role from a checkpoint. A role without `save` stays as constructed.

    Raises:
        ColocateError: The checkpoint isn't visible on this machine, was replaced by another one, or is damaged.
    """
    # Try all places twice, because a rename may be replacing the checkpoint just now.
    folder = next((place for place in places(Path(directory)) * 2 if _is_there(place, identity)), None)
    if folder is None:
        try:
            read(Path(directory))
        except (OSError, ValueError):
            raise ColocateError(
                f"the checkpoint {directory} isn't there, as this machine sees it: it was removed or renamed, or it "
                "doesn't lie on a file system that the driver and all workers share"
            ) from None
        raise _replaced(Path(directory))
    files: dict[str, Any] = {}
    try:
        files = _files_of(role, folder)
        # Each rank checks only a share of the files.
        refuse_changed(folder, dict([*files.items()][role.ctx.rank :: role.ctx.world_size]))
        restored = _restore(role, folder)
        # A rank that the checkpoint doesn't have takes the common state from rank 0, and a new random seed.
        file, first = (_own_file(role, folder, "calls", rank) for rank in (role.ctx.rank, 0))
        is_new = first.exists() and not file.exists()
        file = first if is_new else file
        if file.exists():
            role.ctx.calls_before, role.ctx._calls = json_of(file)
        own_files = {name: _own_file(role, folder, name, rank=0 if is_new else None) for name in FEATURES}
        for name, file in own_files.items():
            if file.exists() or name in worker_context.parts:
                text = file.read_text(encoding="utf-8") if file.exists() else None
                worker_context.part(name).restored(role, text, restored)
        file = _own_file(role, folder, "generator")
        if is_new and _own_file(role, folder, "generator", rank=0).exists():
            role.ctx.generator.manual_seed(derive_seed(role.ctx.seed, "resized", role.name, role.ctx.calls_before))
        elif file.exists():
            import torch

            state = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            role.ctx.generator.set_state(state)
        file = _own_file(role, folder, "defaults")
        if role.own is not None and (wide := role.setting.process_wide) is not None and file.exists():
            wide.restore(role.own, json_of(file))
    except Exception as error:
        if not _is_there(folder, identity):
            raise _replaced(Path(directory)) from error
        refuse_changed(folder, files, error)  # This raises if any of the role's files is damaged.
        note(error, f"role {role.name!r} was being restored from {folder}")
        raise
    if not _is_there(folder, identity):  # The files that were read may be from two checkpoints.
        raise _replaced(Path(directory))


def _files_of(role: RoleInstance, folder: Path) -> dict[str, Any]:
    prefixes = f"{role.name}/", str(_own_file(role, Path(), ""))
    return {name: entry for name, entry in _record(folder)["files"].items() if name.startswith(prefixes)}


def read(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path where a checkpoint currently is, and the checkpoint's record.

    Raises:
        FileNotFoundError: There is no checkpoint.
        OSError: The record can't be read.
        ValueError: The record isn't JSON.
    """
    for place in places(folder) * 2:  # Try twice, because a rename may be replacing the checkpoint.
        try:
            return place, _record(place)
        except FileNotFoundError:
            pass
    raise FileNotFoundError(f"there is no {RECORD} in {folder}")


def identity_of(record: Mapping[str, Any]) -> str:
    """Return the checkpoint's identity, as contained in the checkpoint's record."""
    return str(record["id"])


def _is_there(place: Path, identity: str) -> bool:
    try:
        return identity_of(_record(place)) == identity
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replaced(folder: Path) -> ColocateError:
    try:
        record = read(folder)[1]
        now = f"{record['tag']!r} of group {record['group']!r}"
    except (OSError, ValueError, KeyError, TypeError):
        now = "nothing that is complete"
    return ColocateError(
        f"the checkpoint that was to be restored from {folder} isn't there any more: another one has taken its place "
        f"(now there is {now}), and ranks don't go on from different ones. Restore once more to go on from that; a "
        "group that is to come back by itself needs a folder that nobody else writes to"
    )


def hook(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the plain function of a class's `save` or `restore`, also of a `@method`; None if there is none."""
    attribute = getattr(cls, name, None)
    return attribute.spec.function if isinstance(attribute, RoleMethod) else attribute if callable(attribute) else None


def takes_ranks(cls: type) -> bool:
    """Return whether a role's `restore` has the parameter `ranks`, the number of ranks that saved the role."""
    restore = hook(cls, "restore")
    return restore is not None and "ranks" in inspect.signature(restore).parameters


def _save(role: RoleInstance, folder: Path) -> SecondHalf | None:
    assert role.name is not None
    role_folder = folder / role.name
    if not role_folder.is_dir() or role.stands_in:
        return None
    half, had = SecondHalf(role), {**getattr(role.instance, "__dict__", {})}
    role.run_hook(_bound(role, "save"), str(role_folder), name="save", by=half.take_state)
    has = getattr(role.instance, "__dict__", {}).items()
    # As in torch's recipe for async saves, `save` may store a future in an attribute of the role.
    half.add([value for key, value in has if value is not had.get(key) and is_future(value)])
    return half


def _restore(role: RoleInstance, folder: Path) -> bool:
    """Call a role's `restore` if the checkpoint has a state of the role, and return whether `restore` was called."""
    assert role.name is not None
    role_folder = folder / role.name
    if not role_folder.is_dir() or role.stands_in:
        return False
    ranks = _record(folder)["roles"][role.name]["ranks"]
    more = {"ranks": ranks} if takes_ranks(type(role.instance)) else {}
    role.run_hook(partial(_bound(role, "restore"), **more), str(role_folder), name="restore")
    return True


def _bound(role: RoleInstance, name: str) -> Callable[..., Any]:
    attribute = getattr(type(role.instance), name)
    bound = MethodType(attribute.spec.function, role.instance) if isinstance(attribute, RoleMethod) else None
    return bound or getattr(role.instance, name)


def _record(place: Path) -> Any:
    return json_of(place / RECORD)


def _write_own(role: RoleInstance, folder: Path, what: str, data: bytes) -> None:
    path = _own_file(role, folder, what)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def _own_file(role: RoleInstance, folder: Path, what: str, rank: int | None = None) -> Path:
    return folder / OWN / f"{role.name}-{role.ctx.rank if rank is None else rank}.{what}"
