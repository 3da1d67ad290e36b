"""Process groups for role objects outside workers. This module has the same functions as a worker's `groups`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate._role.context import Context
from colocate.features.process_groups.torch_groups import (
    ProcessGroupPlan,
    create_hash_store,
    serve_store,
    share_default,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_lock = threading.Lock()
_alone: list[ProcessGroup] = []
_lasting: set[tuple[int, str]] = set()
_stores: list[tuple[Any, tuple[str, int]]] = []


def get(ctx: Context, axis: str | None) -> ProcessGroup:
    """Return a process group of one rank, which all role objects in this process share."""
    with _lock:
        if not _alone:
            with _track_descriptors():
                _alone.append(
                    ProcessGroupPlan("colocate/alone", "", [0], 0, False, False, "cpu", 60.0).make_group(
                        create_hash_store()
                    )
                )
        return _alone[0]


def lasting_descriptors() -> frozenset[tuple[int, str]]:
    """Return the file descriptors that stay open until the process ends, with their files."""
    return frozenset(_lasting)


@contextlib.contextmanager
def _track_descriptors() -> Iterator[None]:
    """A context manager that records the descriptors opened in the block. These stay open until the process ends."""
    before = _descriptors()
    yield
    _lasting.update(_descriptors() - before)


def _descriptors() -> set[tuple[int, str]]:
    descriptors: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The listing itself used a descriptor that is closed by now.
            descriptors.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return descriptors


def mesh(ctx: Context, name: str | None) -> DeviceMesh:
    """Return a device mesh with one rank; see `Context.device_mesh`."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    with _track_descriptors():
        share_default(_alone)  # The default group is never released, because the whole process uses this group.
    axes = (*ctx.mesh.shape,)
    return DeviceMesh.from_group(
        [get(ctx, None)] * len(axes),
        "cpu",
        mesh=torch.zeros([1] * len(axes), dtype=torch.int),
        mesh_dim_names=axes,
    )


def rendezvous() -> tuple[str, int]:
    """Return the address of a store for a rendezvous; see `Context.rendezvous`."""
    with _lock:
        if not _stores:
            with _track_descriptors():
                _stores.append(serve_store(wire.LOOPBACK))
        return _stores[0][1]


def make_again(ctx: Context) -> None:
    """Do nothing, because a process group of one rank is never cut (aborted)."""
