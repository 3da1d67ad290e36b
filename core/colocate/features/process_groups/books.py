"""Reads and changes torch's tables of process groups: counts operations, and cuts (aborts) and removes groups.

These tables also have groups that a role makes itself (`init_process_group`, `new_group`), so that such groups are
counted and cut like colocate's own groups.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import select
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colocate._system.threads import Thread
from colocate.features.process_groups.gloo_devices import GlooDevice, share_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Duplicates of each group's connected sockets, which outlive gloo's own descriptors.
_sockets: dict[str, list[socket.socket]] = {}
# The number of each group's sends and receives, to be subtracted from gloo's sequence number.
_transfers: dict[str, int] = {}
_books = threading.Lock()


def start_recording() -> None:
    """Start to record the sockets, and the sends and receives, of every process group that this process makes."""
    from torch.distributed import ProcessGroup, distributed_c10d as c10d

    # Disable torch's debug wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL), because no wait in it can be ended.
    c10d._create_process_group_wrapper = lambda wrapped_pg, **_: wrapped_pg
    make: Callable[..., Any] = c10d._new_process_group_helper
    if getattr(make, "records_sockets", False):
        return

    def recording(group_size: int, *args: Any, **kwargs: Any) -> Any:
        with share_device(c10d) as device:
            before = {inode for _, inode in device.list_sockets()} if group_size > 1 else set()
            group, store = make(group_size, *args, **kwargs)
            # Only gloo's sockets are needed: they are shut down for a cut, but NCCL groups are aborted.
            if (
                group_size > 1
                and (name := _group_name(group)) is not None
                and all(map(_is_gloo, _list_backends(group)))
            ):
                with _books:
                    _sockets[name] = find_connections(device, before)
        return group, store

    def counting(transfer: Callable[..., Any]) -> Callable[..., Any]:
        # Gloo counts a send or receive as an operation of the group, although only two ranks take part.
        def counted(group: Any, tensors: list[Any], *args: Any) -> Any:
            work = transfer(group, tensors, *args)
            name = _group_name(group)
            if name is not None:
                _transfers[name] = _transfers.get(name, 0) + int(tensors[0].device.type == "cpu")
            return work

        return counted

    recording.records_sockets = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = recording
    for name in ("send", "recv", "recv_anysource"):
        setattr(ProcessGroup, name, counting(getattr(ProcessGroup, name)))


def list_groups() -> dict[str, ProcessGroup]:
    """Return all process groups of this process by name, with the default group last.

    Callers must not store the groups, because such a reference would look like a reference of a role.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")  # This is None if torch wasn't imported.
    world = getattr(c10d, "_world", None)  # This is None while torch is being imported.
    if world is None:
        return {}
    entries = sorted(world.pg_names.items(), key=lambda item: item[0] is world.default_pg)
    return {str(name): group for group, name in entries}


def has_groups() -> bool:
    """Return whether this process has any process groups."""
    return bool(list_groups())


def find_group(name: str) -> ProcessGroup | None:
    """Return the group with a name, or None. The name of a group made by a role includes a hash of the ranks."""
    bare, hash_mark, _ = name.partition("#")
    group = list_groups().get(bare)
    return None if group is None or (hash_mark and _make_shared_name(bare, group) != name) else group


def _make_shared_name(name: str, group: ProcessGroup) -> str:
    """Return the name under which all slots know a process group.

    Torch numbers the groups made by roles in each process from 0, so their names get a hash of the ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    if "/" in name:
        return name
    ranks = ",".join(map(str, c10d._world.pg_group_ranks.get(group, ())))
    return f"{name}#{hashlib.blake2b(ranks.encode(), digest_size=6).hexdigest()}"


def shared_name(group: ProcessGroup) -> str:
    """Return the name under which all slots know a process group, or "" for a group without a name."""
    name = _group_name(group)
    return "" if name is None else _make_shared_name(name, group)


def get_reference(name: str) -> weakref.ref[ProcessGroup] | None:
    """Return a weak reference to a process group, which shows whether the group still exists after `forget_group`."""
    group = find_group(name)
    return None if group is None else weakref.ref(group)


def list_members(name: str) -> Collection[int]:
    """Return the ranks of a group, as ranks of the default group."""
    from torch.distributed import distributed_c10d as c10d

    group = find_group(name)
    return () if group is None else list(c10d._world.pg_group_ranks.get(group, ()))


def count_operations() -> dict[str, tuple[int, int]]:
    """Return the number of operations that this rank has started and the size, for each group of several ranks."""
    return {
        _make_shared_name(name, group): (_count_group(name, group), group.size())
        for name, group in list_groups().items()
        if group.size() > 1
    }


def count_all() -> int:
    """Return the number of operations that this process has started on all groups of several ranks."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None or not world.pg_names:  # Return early, because each call runs this.
        return 0
    return sum(_count_group(name, group) for name, group in list_groups().items() if group.size() > 1)


def _count_group(name: str, group: ProcessGroup) -> int:
    begun = sum(backend._get_sequence_number_for_group() for backend in _list_backends(group))
    return int(begun) - _transfers.get(name, 0)


def list_transferring() -> list[str]:
    """Return the names of the process groups on which this rank has sent or received data."""
    return [
        _make_shared_name(name, group)
        for name, group in list_groups().items()
        if group.size() > 1 and name in _transfers
    ]


def communicator_bytes() -> int | None:
    """Return the bytes of device memory in the communicators of all groups, or None if no backend reports any.

    NCCL 2.29.7 or later and torch 2.12 or later are needed.
    """
    total = None
    for group in list_groups().values():
        for backend in _list_backends(group):
            try:
                stats = backend.memory_stats()
            # This torch, NCCL or backend has no statistics, or there is no communicator yet.
            except (AttributeError, RuntimeError):
                continue
            total = (total or 0) + int(stats["persist" if stats["suspended"] else "total"])
    return total


def _list_backends(group: Any) -> list[Any]:
    """Return a group's backends. Callers must not store a backend, because dropping the last reference may block."""
    backends: dict[int, Any] = {}
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            backend = group
        backends[id(backend)] = backend
    return list(backends.values()) or [group]  # A group that is written in Python may have no backends.


def cut_groups(names: Collection[str]) -> threading.Thread | None:
    """Cut (abort) process groups, in order to end all waits on this rank and on peers.

    Returns the thread of an unfinished abort, or None.
    """
    names = [*names]  # Keep names, because a reference to a group would look like a reference of role code.
    bare = [name.partition("#")[0] for name in names if find_group(name) is not None]
    with _books:
        connections = [connection for name in bare for connection in _sockets.get(name, ())]
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # The peer or this worker has already closed the connection.
            pass

    def abort() -> None:
        backends = _abortable_backends(names)
        # Abort all backends in one NCCL batch, because a single abort waits for other communicators on the device.
        together = [backend for backend in backends if hasattr(backend, "_group_start")]
        if together:
            together[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:
            if together:
                together[0]._group_end()

    if not _abortable_backends(names):
        return None
    # Use a thread, because an abort waits for the device, where a kernel may wait for a peer that is being cut, too.
    thread = Thread(target=abort, name="colocate-abort")
    thread.start()
    return thread


def _abortable_backends(names: Iterable[str]) -> list[Any]:
    """Return the backends that can be aborted in order to end the waits of peers. Gloo's `abort` does nothing."""
    groups = [group for name in names if (group := find_group(name)) is not None]
    return [backend for group in groups for backend in _list_backends(group) if not _is_gloo(backend)]


def has_lost_peer(names: Iterable[str]) -> bool:
    """Return whether a connection of these groups was closed by the peer or shut down by this process."""
    poll = select.poll()
    with _books:
        for name in names:
            for connection in _sockets.get(name.partition("#")[0], ()):
                if (fd := connection.fileno()) >= 0:
                    poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))


def forget_group(name: str) -> list[Any]:
    """Remove a group from torch's tables, and return backends that may block when the last reference is dropped.

    Together with the default group, all other groups are removed.
    """
    group = find_group(name)
    if group is None:
        return []
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    if group is world.default_pg:
        backends = [backend for item in list(world.pg_map) for backend in _list_backends(item) if _is_gloo(backend)]
        _close_sockets({*_sockets, *_transfers})
        # Call torch's original function, because the replacement for role code (`adopt_default`) keeps the group.
        inspect.unwrap(dist.destroy_process_group)()
        return backends
    backends = [backend for backend in _list_backends(group) if _is_gloo(backend)]
    name = name.partition("#")[0]
    _close_sockets([name])
    c10d._unregister_process_group(c10d.GroupName(name))  # type: ignore[attr-defined]
    tables: Sequence[Mapping[Any, Any]] = (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag),
        world.pg_coalesce_state,
    )
    for table in tables:
        table.pop(group, None)  # type: ignore[attr-defined]
    for tag, tagged in list(world.tags_to_pg.items()):
        world.tags_to_pg[tag] = [item for item in tagged if item is not group]
    return backends


def forget_all() -> list[Any]:
    """Remove all groups from torch's tables. `forget_group` describes the returned list."""
    return [backend for name in [*list_groups()] for backend in forget_group(name)]


def repoint_mesh(mesh: DeviceMesh, groups: Iterable[ProcessGroup]) -> bool:
    """Replace the process groups of a mesh by new groups of the same names, and return whether torch supports this."""
    registry: dict[str, ProcessGroup] | None = getattr(mesh, "_pg_registry", None)
    if registry is None:
        return False
    registry.update({str(group.group_name): group for group in groups})
    return True


def distinguish_meshes() -> None:
    """Patch torch so that two tensor layouts are unequal if their meshes have different process groups.

    Torch caches results of its analysis of an operation, including the mesh of the result, and treats meshes of the
    same ranks as equal. So parameters of a second role could get the groups of the first role.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    equal: Callable[..., bool] = DTensorSpec.__eq__
    if getattr(equal, "tells_apart", False):
        return

    def tells(spec: Any, other: Any) -> bool:
        return equal(spec, other) and (
            spec.mesh is other.mesh
            or getattr(spec.mesh, "_dim_group_names", None) == getattr(other.mesh, "_dim_group_names", None)
        )

    tells.tells_apart = True  # type: ignore[attr-defined]
    DTensorSpec.__eq__ = tells  # type: ignore[method-assign]


def release_mesh(mesh: DeviceMesh) -> None:
    """Remove dropped process groups from a mesh, because torch 2.11 may keep the mesh forever."""
    live = set(map(id, list_groups().values()))
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    for item in (root, mesh):
        registry: dict[str, ProcessGroup] = getattr(item, "_pg_registry", {})
        for name in [name for name, group in registry.items() if id(group) not in live]:
            del registry[name]


def _close_sockets(names: Iterable[str]) -> None:
    with _books:
        for name in names:
            for connection in _sockets.pop(name, ()):
                connection.close()
            _transfers.pop(name, None)


def _group_name(group: Any) -> str | None:
    from torch.distributed import distributed_c10d as c10d

    return c10d._world.pg_names.get(group)


def _is_gloo(backend: Any) -> bool:
    from torch.distributed import ProcessGroupGloo

    return isinstance(backend, ProcessGroupGloo)


def find_connections(device: GlooDevice, before: Collection[int]) -> list[socket.socket]:
    """Return duplicates of a device's connected sockets, except those with inodes in `before`."""
    duplicates: list[socket.socket] = []
    for fd, inode in device.list_sockets():
        if inode in before:
            continue
        try:
            duplicate = os.dup(fd)
        except OSError:
            continue
        status = os.fstat(duplicate)
        if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):  # The descriptor was reused for another file.
            os.close(duplicate)
            continue
        connection = socket.socket(fileno=duplicate)
        try:
            connection.getpeername()
        except OSError:  # The socket isn't connected.
            connection.close()
            continue
        duplicates.append(connection)
    return duplicates
