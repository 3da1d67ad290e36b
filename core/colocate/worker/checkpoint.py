"""A worker's share of a checkpoint: its roles' `save` and `restore`, and the states of their generators.

Each role has a folder of its own, the same for all of its ranks; colocate's files are beside those.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from colocate.errors import ColocateError
from colocate.worker.failure import note
from colocate.worker.hosted import HostedRole

RECORD = "checkpoint.json"  # in the folder of one that is complete
OWN = ".colocate"


def save(
    roles: Sequence[HostedRole], directory: str, awake: Callable[[HostedRole], AbstractContextManager[None]]
) -> None:
    """Have roles write their states.

    Args:
        roles: Those of this worker.
        directory: The checkpoint's folder.
        awake: Has a role's memory be there in a block.

    Raises:
        ColocateError: This machine doesn't see the folder.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ColocateError(
            f"the checkpoint's folder {folder} isn't there on this machine: it has to lie on a file system that the "
            "driver and all workers share"
        )
    for role in roles:
        with awake(role):
            _call(role, "save", folder)
        generator = role.ctx._generator
        if generator is not None:
            own = _generator_file(role, folder)
            own.parent.mkdir(exist_ok=True)
            own.write_bytes(generator.get_state().numpy().tobytes())


def restore(role: HostedRole, directory: str) -> None:
    """Have a role go on where it was saved. One that has no `save` is as its constructor made it.

    Raises:
        ColocateError: The checkpoint isn't there, or not for this machine.
    """
    folder = Path(directory)
    if not (folder / RECORD).is_file():
        raise ColocateError(
            f"the checkpoint {folder} isn't there, as this machine sees it: it was removed or renamed, or it doesn't "
            "lie on a file system that the driver and all workers share"
        )
    try:
        _call(role, "restore", folder)
        own = _generator_file(role, folder)
        if own.exists():
            import torch

            state = torch.frombuffer(bytearray(own.read_bytes()), dtype=torch.uint8)
            role.ctx.generator.set_state(state)
    except Exception as error:
        note(error, f"role {role.name!r} was being restored from {folder}")
        raise


def takes_ranks(cls: type) -> bool:
    """Whether a role's `restore` has a parameter `ranks`: how many ranks have saved, which may be others than now."""
    restore = getattr(cls, "restore", None)
    return restore is not None and "ranks" in inspect.signature(restore).parameters


def role_folder(folder: Path, role: str) -> Path:
    """Where the ranks of a role write."""
    return folder / role


def _call(role: HostedRole, name: str, folder: Path) -> None:
    method: Any = getattr(role.instance, name, None)
    assert role.name is not None
    if method is None or not role_folder(folder, role.name).is_dir():
        return
    more: dict[str, Any] = {}
    if name == "restore" and takes_ranks(type(role.instance)):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        more["ranks"] = record["roles"][role.name]["ranks"]
    role.run_hook(partial(method, **more), str(role_folder(folder, role.name)))


def _generator_file(role: HostedRole, folder: Path) -> Path:
    return folder / OWN / f"{role.name}-{role.ctx.rank}.generator"
