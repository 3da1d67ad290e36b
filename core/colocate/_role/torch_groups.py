"""Process groups in torch: making one with its peers, and taking it out of torch's books again."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import attrs

from colocate import wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = datetime.timedelta(minutes=30)
_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
_alone_lock = threading.Lock()
_alone: list[ProcessGroup] = []


@attrs.define(eq=False)
class Made:
    """A group and duplicates of its connected sockets, which outlive gloo's own."""

    group: ProcessGroup
    role: str | None
    sockets: list[socket.socket]
    default: bool
    asked: int | None = None  # the number of the last call that asked for it


@attrs.frozen
class Plan:
    """What a group is made from, and how."""

    role: str | None
    board: str
    members: int
    index: int
    default: bool
    backend: str

    def store(self, host: str, port: int, listener: socket.socket | None) -> Any:
        """What its ranks tell each other their addresses through: that of rank 0."""
        import torch.distributed as dist

        found = dist.TCPStore(  # type: ignore[attr-defined]  # torch has it here without saying so
            host,
            port,
            self.members,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=_CONNECT_TIMEOUT,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        found.set_timeout(_TIMEOUT)
        return dist.PrefixStore(self.board, found)  # type: ignore[attr-defined]

    def make(self, store: Any) -> Made:
        """Make it, together with all its ranks."""
        before = set(_connected_sockets())
        group = new_group(store, self.index, self.members, self.board, self.backend)
        return Made(group, self.role, _since(before) if self.members > 1 else [], self.default)


def lost_a_peer(groups: list[Made]) -> bool:
    """Whether the other end of a connection is gone, or this one has been shut down."""
    poll = select.poll()
    for made in groups:
        for connection in made.sockets:
            if (fd := connection.fileno()) >= 0:
                poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def single_rank_group() -> ProcessGroup:
    """A group of this process alone, shared by all role objects outside any worker."""
    with _alone_lock:
        if not _alone:
            _alone.append(new_group(hash_store(), 0, 1, "colocate/alone", "gloo"))
        return _alone[0]


def new_group(store: Any, rank: int, size: int, name: str, backend: str) -> ProcessGroup:
    """A group, together with its other ranks, which meet it through a store under a name."""
    # The public API makes groups only inside the default one, which colocate leaves to the user. This is what
    # init_process_group itself does, and what makes broadcast(group_src=) work. (group.rank() tells the rank; torch's
    # get_rank(group) wants a default group whatever it is given.) Imported here: only who asks for a group has torch.
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    made, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), store, group_name=c10d.GroupName(name), timeout=_TIMEOUT
    )
    c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
    group: ProcessGroup = made
    return group


def has_default() -> bool:
    """Whether torch's default group is set."""
    import torch.distributed as dist

    return dist.is_initialized()


def make_default(group: ProcessGroup) -> None:
    """Set torch's default group."""
    from torch.distributed import distributed_c10d as c10d

    c10d._update_default_pg(group)  # as init_process_group does


def forget_all(groups: dict[tuple[Any, ...], Made]) -> list[Any]:
    """Forget all of them; what is left of them is to be buried."""
    left = []
    while groups:
        _, made = groups.popitem()
        left += forget(made)
        del made
    return left


def forget(made: Made) -> list[Any]:
    """Take a group out of torch's books; what would wait for the work that still runs in it, were it dropped here."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for connection in made.sockets:
        connection.close()
    world = c10d._world
    if made.group is world.default_pg:  # those that the user has made inside it go with it
        left = [backend for group in list(world.pg_map) for backend in _gloo(group)]
        dist.destroy_process_group()
        return left
    left = _gloo(made.group)
    name = world.pg_names.get(made.group)
    if name is not None:  # gone with the default group
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]  # as the group was registered, by torch itself
    for table in (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag),
        world.pg_coalesce_state,
    ):
        table.pop(made.group, None)
    for tag, tagged in list(world.tags_to_pg.items()):
        world.tags_to_pg[tag] = [group for group in tagged if group is not made.group]
    return left


def _gloo(group: ProcessGroup) -> list[Any]:
    from torch.distributed import ProcessGroupGloo

    backends = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in backends if isinstance(backend, ProcessGroupGloo)]


def hash_store() -> Any:
    """What a single rank needs in place of a store that others reach."""
    import torch.distributed as dist

    return dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so


def _connected_sockets() -> dict[str, int]:
    """Descriptors of this process's connected TCP sockets that aren't colocate's own, by what the system calls them.

    A descriptor's number tells no socket from another: gloo closes those of an old group when it likes.
    """
    found = {}
    own = wire.own_descriptors()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
            if int(entry) in own or not name.startswith("socket:"):
                continue
            with _duplicate(int(entry)) as probe:
                if probe.family in (socket.AF_INET, socket.AF_INET6) and probe.type == socket.SOCK_STREAM:
                    probe.getpeername()
                    found[name] = int(entry)
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def _since(before: set[str]) -> list[socket.socket]:
    """Duplicates of the connected sockets that weren't there before."""
    found = []
    for name, fd in _connected_sockets().items():
        if name not in before:
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(_duplicate(fd))
    return found


def _duplicate(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))
