"""Torch's books, which it keeps of all process groups of a process: read, and groups cut, and taken out of them again.

What is asked here of any group is read from those, so that one that a role has made by itself (`init_process_group`,
`new_group`) is counted and cut as colocate's own are.
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
from colocate.features.process_groups.gloo_devices import Device, on_a_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_sockets: dict[str, list[socket.socket]] = {}  # duplicates of groups' connected sockets, which outlive gloo's own
_transfers: dict[str, int] = {}  # sends and receives of groups, as far as gloo has counted them
_books = threading.Lock()


def record() -> None:
    """From now on, know of each group its sockets and its sends and receives, whoever in this process makes it."""
    from torch.distributed import ProcessGroup, distributed_c10d as c10d

    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks would wait for each other before each operation, within torch, where
    # nobody sees them: who waits there in vain couldn't be freed.
    c10d._create_process_group_wrapper = lambda wrapped_pg, **_: wrapped_pg
    make: Callable[..., Any] = c10d._new_process_group_helper
    if getattr(make, "records_sockets", False):
        return

    def recording(group_size: int, *args: Any, **kwargs: Any) -> Any:
        with on_a_device(c10d) as device:
            before = {inode for _, inode in device.sockets()} if group_size > 1 else set()
            group, store = make(group_size, *args, **kwargs)
            # NCCL has sockets too, and is cut by its own means.
            if group_size > 1 and (name := _name_of(group)) is not None and all(map(_is_gloo, _backends(group))):
                with _books:
                    _sockets[name] = connections(device, before)
        return group, store

    def counting(transfer: Callable[..., Any]) -> Callable[..., Any]:
        # Gloo counts them as operations of the group, which they aren't: two ranks have a part in each.
        def counted(group: Any, tensors: list[Any], *args: Any) -> Any:
            found = transfer(group, tensors, *args)
            name = _name_of(group)
            if name is not None:
                _transfers[name] = _transfers.get(name, 0) + int(tensors[0].device.type == "cpu")
            return found

        return counted

    recording.records_sockets = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = recording
    for name in ("send", "recv", "recv_anysource"):
        setattr(ProcessGroup, name, counting(getattr(ProcessGroup, name)))


def all_groups() -> dict[str, ProcessGroup]:
    """Return the groups of this process by name, the default one last. Who keeps one looks like a role that does."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")  # there are none where nobody needs torch
    world = getattr(c10d, "_world", None)  # None while it is being imported
    if world is None:
        return {}
    found = sorted(world.pg_names.items(), key=lambda item: item[0] is world.default_pg)
    return {str(name): group for group, name in found}


def are_any() -> bool:
    """Whether there are any."""
    return bool(all_groups())


def named(name: str) -> ProcessGroup | None:
    """The group of a name; of one that a role has made, its ranks go with that."""
    bare, hash_mark, _ = name.partition("#")
    group = all_groups().get(bare)
    return None if group is None or (hash_mark and _known_as(bare, group) != name) else group


def _known_as(name: str, group: ProcessGroup) -> str:
    """Return what a group is called among the slots: torch counts those that roles make, in each process from 0."""
    from torch.distributed import distributed_c10d as c10d

    if "/" in name:
        return name
    ranks = ",".join(map(str, c10d._world.pg_group_ranks.get(group, ())))
    return f"{name}#{hashlib.blake2b(ranks.encode(), digest_size=6).hexdigest()}"


def known_as(group: ProcessGroup) -> str:
    """Return what a group of this process is called among the slots; "" of one that has no name."""
    name = _name_of(group)
    return "" if name is None else _known_as(name, group)


def reference(name: str) -> weakref.ref[ProcessGroup] | None:
    """Return what tells whether a group is still held, once it is forgotten."""
    group = named(name)
    return None if group is None else weakref.ref(group)


def members(name: str) -> Collection[int]:
    """The ranks in the default group of those that share a group."""
    from torch.distributed import distributed_c10d as c10d

    group = named(name)
    return () if group is None else list(c10d._world.pg_group_ranks.get(group, ()))


def operations() -> dict[str, tuple[int, int]]:
    """How many operations this rank has begun on each group of several ranks, and how many ranks that has."""
    return {
        _known_as(name, group): (_count(name, group), group.size())
        for name, group in all_groups().items()
        if group.size() > 1
    }


def count() -> int:
    """How many operations this process has begun on all groups of several ranks."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None or not world.pg_names:  # as often, and each call asks
        return 0
    return sum(_count(name, group) for name, group in all_groups().items() if group.size() > 1)


def _count(name: str, group: ProcessGroup) -> int:
    begun = sum(backend._get_sequence_number_for_group() for backend in _backends(group))
    return int(begun) - _transfers.get(name, 0)


def with_transfers() -> list[str]:
    """The groups on which this rank has sent or received, of several ranks."""
    return [_known_as(name, group) for name, group in all_groups().items() if group.size() > 1 and name in _transfers]


def nbytes() -> int | None:
    """The bytes of devices that the communicators of all groups have; None where none of them tells.

    NCCL does from 2.29.7 on, and torch passes it on from 2.12 on.
    """
    found = None
    for group in all_groups().values():
        for backend in _backends(group):
            try:
                told = backend.memory_stats()
            except (AttributeError, RuntimeError):  # torch, NCCL or the backend has no such thing, or it isn't made yet
                continue
            found = (found or 0) + int(told["persist" if told["suspended"] else "total"])
    return found


def _backends(group: Any) -> list[Any]:
    """Each once. Nobody may keep one: who lets go of the last reference waits for what still runs in it."""
    found: dict[int, Any] = {}
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            backend = group
        found[id(backend)] = backend
    return list(found.values()) or [group]  # which is written in Python: it has none but itself


def cut(names: Collection[str]) -> threading.Thread | None:
    """Free whoever waits for this rank in these groups, of no use after that; return what goes on with it, if any."""
    names = [*names]  # without groups, if they are a table of these: one that is named looks like one a role holds
    bare = [name.partition("#")[0] for name in names if named(name) is not None]
    with _books:
        connections = [connection for name in bare for connection in _sockets.get(name, ())]
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has closed it already, or this worker has
            pass

    def abort() -> None:
        backends = _that_abort(names)
        # All of them as one: an abort waits for the communicators that share its device.
        together = [backend for backend in backends if hasattr(backend, "_group_start")]
        if together:
            together[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:
            if together:
                together[0]._group_end()

    if not _that_abort(names):
        return None
    # Not here: it waits for the device, on which a kernel may wait for a peer that is cut in the same moment.
    thread = Thread(target=abort, name="colocate-abort")
    thread.start()
    return thread


def _that_abort(names: Iterable[str]) -> list[Any]:
    """The backends of groups that free their peers when they are aborted; gloo's do nothing then."""
    groups = [group for name in names if (group := named(name)) is not None]
    return [backend for group in groups for backend in _backends(group) if not _is_gloo(backend)]


def lost_a_peer(names: Iterable[str]) -> bool:
    """Whether the other end of a connection is gone, or this one has been shut down."""
    poll = select.poll()
    with _books:
        for name in names:
            for connection in _sockets.get(name.partition("#")[0], ()):
                if (fd := connection.fileno()) >= 0:
                    poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))


def forget(name: str) -> list[Any]:
    """Take a group out of torch's books; what would wait for the work that still runs in it, were it dropped here.

    With the default group all others go.
    """
    group = named(name)
    if group is None:
        return []
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    if group is world.default_pg:
        left = [backend for each in list(world.pg_map) for backend in _backends(each) if _is_gloo(backend)]
        _close_sockets({*_sockets, *_transfers})
        inspect.unwrap(dist.destroy_process_group)()  # what role code calls leaves it there (`take_up`)
        return left
    left = [backend for backend in _backends(group) if _is_gloo(backend)]
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
        world.tags_to_pg[tag] = [each for each in tagged if each is not group]
    return left


def forget_all() -> list[Any]:
    """Forget all of them; see `forget`."""
    return [backend for name in [*all_groups()] for backend in forget(name)]


def point(mesh: DeviceMesh, groups: Iterable[ProcessGroup]) -> bool:
    """Have a mesh go on with other groups of the same names; whether it can."""
    registry: dict[str, ProcessGroup] | None = getattr(mesh, "_pg_registry", None)
    if registry is None:
        return False
    registry.update({str(group.group_name): group for group in groups})
    return True


def tell_apart() -> None:
    """From now on, torch doesn't take how a tensor lies on a mesh for how one lies on an equal mesh of other groups.

    It keeps what it has found out of an operation, also which mesh the result lies on. To it, meshes of the same ranks
    are equal: so the parameters of a second role would lie on the groups of the first one.
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


def let_go(mesh: DeviceMesh) -> None:
    """Have a mesh keep no group that was forgotten: torch may keep the mesh for good (2.11 loses references to it)."""
    there = set(map(id, all_groups().values()))
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    for each in (root, mesh):
        registry: dict[str, ProcessGroup] = getattr(each, "_pg_registry", {})
        for name in [name for name, group in registry.items() if id(group) not in there]:
            del registry[name]


def _close_sockets(names: Iterable[str]) -> None:
    with _books:
        for name in names:
            for connection in _sockets.pop(name, ()):
                connection.close()
            _transfers.pop(name, None)


def _name_of(group: Any) -> str | None:
    from torch.distributed import distributed_c10d as c10d

    return c10d._world.pg_names.get(group)


def _is_gloo(backend: Any) -> bool:
    from torch.distributed import ProcessGroupGloo

    return isinstance(backend, ProcessGroupGloo)


def connections(device: Device, before: Collection[int]) -> list[socket.socket]:
    """Duplicates of a device's connections that weren't there before, by their inodes."""
    found: list[socket.socket] = []
    for fd, inode in device.sockets():
        if inode in before:
            continue
        try:
            own = os.dup(fd)
        except OSError:
            continue
        status = os.fstat(own)
        if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):  # it is something else by now
            os.close(own)
            continue
        connection = socket.socket(fileno=own)
        try:
            connection.getpeername()
        except OSError:  # it isn't connected to anybody
            connection.close()
            continue
        found.append(connection)
    return found
