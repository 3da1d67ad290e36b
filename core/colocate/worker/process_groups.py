"""torch.distributed groups of a role's ranks: set up without a port race, cut when a call fails, renewed after a hold.

Rank 0 of the group binds a free loopback or node port itself and posts it on the driver's board, where the others wait
for it. A gloo group whose rank has raised is cut by shutting its sockets down, which frees peers that wait in a
collective at once (destroying the group frees nobody while a reference lives).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from colocate import wire
from colocate._context import Context, MeshPlace
from colocate._mesh import did_you_mean
from colocate.errors import CapabilityError, ConfigError
from colocate.worker.consequence import Consequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = datetime.timedelta(minutes=30)
_ATTEMPT_TIMEOUT = datetime.timedelta(seconds=1)
_ATTEMPTS = 60
_LETS_GO_S, _LOOK_S = 0.25, 0.005
_PEERS_FAILED = "the ranks that would share this process group are in a failed call"
_alone_lock = threading.Lock()
_alone: list[ProcessGroup] = []


@attrs.define(eq=False)
class _Made:
    """A group and duplicates of its connected sockets, which outlive gloo's own."""

    group: ProcessGroup
    role: str | None
    sockets: list[socket.socket]
    default: bool


class ProcessGroups:
    """The groups of one worker, by role and axis. Used on the lane; `cut` from any thread."""

    def __init__(self, ask: Callable[..., Any], in_process: bool, host: str = "127.0.0.1") -> None:
        """Make none yet.

        Args:
            ask: Asks the driver.
            in_process: The workers are threads of one process, which torch can give no groups of their own.
            host: Address under which the other ranks reach this machine.
        """
        self._ask = ask
        self._in_process = in_process
        self._host = host
        self._made: dict[tuple[Any, ...], _Made] = {}
        self._lock = threading.Lock()
        self._alone: dict[tuple[Any, ...], _Made] = {}  # of one rank: no failure elsewhere touches them
        self._making: set[int] | None = None  # the sockets that there were before the group that is being made
        self._given_up = False
        self._epoch = 0
        self.generation = 0
        self.default_role: str | None = None

    @property
    def used(self) -> bool:
        """Whether there are groups now."""
        return bool(self._made)

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        """The group of the role's ranks along an axis; made when all of them ask."""
        members, index, name = _members(ctx, axis)
        if self._in_process and members > 1:
            raise CapabilityError(
                f"ctx.process_group() of {members} ranks needs a process each, but the slots of group {ctx.group!r} "
                "are threads of one: use connect('local', processes=True), in a config executor.with.processes=true",
                capability="OwnProcess",
                executors=("local with processes=True",),
                role=ctx.role,
                rank=ctx.rank,
            )
        key = (ctx.role, name)
        groups = self._made if members > 1 or self._is_default(ctx, name) else self._alone
        found = groups.get(key)
        if found is None:
            found = self._make(ctx, members, index, name)
            with self._lock:
                groups[key] = found
        return found.group

    def _is_default(self, ctx: Context, name: str) -> bool:
        return axis_free(name) and ctx.role is not None and self.default_role == ctx.role

    def _make(self, ctx: Context, members: int, index: int, name: str) -> _Made:
        # Imported here: only a role that asks for a group has torch.
        import torch.distributed as dist

        default = self._is_default(ctx, name)
        board = f"{ctx.group}/{self.generation}/{self._epoch}/{name}"
        self._given_up = False
        self._making = _connected_sockets()
        try:
            store = self._store(dist, board, index, members)
            if self._given_up:
                raise Consequence(_PEERS_FAILED)
            before = _connected_sockets()
            backend = "nccl" if str(ctx.device).startswith("cuda") else "gloo"
            if default:
                dist.init_process_group(backend, store=store, rank=index, world_size=members, timeout=_TIMEOUT)
                group: Any = dist.group.WORLD
            else:
                group = _new_group(dist, store, index, members, board, backend)
        except Exception as error:
            if not self._given_up or isinstance(error, Consequence):
                raise
            raise Consequence(_PEERS_FAILED) from error
        finally:
            self._making = None
        sockets = [_duplicate(fd) for fd in _connected_sockets() - before] if members > 1 else []
        return _Made(group, ctx.role, sockets, default)

    def _store(self, dist: Any, board: str, index: int, members: int) -> Any:
        if members == 1:
            return _hash_store()
        if index == 0:
            listener = socket.create_server((self._host, 0))
            host, port = listener.getsockname()[:2]
            store = dist.TCPStore(
                host, port, members, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self._ask("post", board, (host, port))
        else:
            host, port = self._ask("get", board)
            store = self._connected(dist, host, port, members)
        return dist.PrefixStore(board, store)

    def _connected(self, dist: Any, host: str, port: int, members: int) -> Any:
        """The other end of the store, which has been there; if it is gone, torch alone would try for minutes."""
        for attempt in range(_ATTEMPTS):
            try:
                store = dist.TCPStore(
                    host, port, members, is_master=False, wait_for_workers=False, timeout=_ATTEMPT_TIMEOUT
                )
            except (dist.DistNetworkError, dist.DistStoreError):
                if self._given_up or attempt == _ATTEMPTS - 1:
                    raise
            else:
                store.set_timeout(_TIMEOUT)
                return store
        raise AssertionError("the last attempt raises")

    def lost_a_peer(self) -> bool:
        """Whether the other end of a group's connection is gone: then this rank's failure is only a consequence."""
        poll = select.poll()
        for made in list(self._made.values()):
            for connection in made.sockets:
                poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def give_up_making(self) -> None:
        """Free this rank where it waits for its peers to make a group: they have left."""
        self._given_up = True
        before = self._making
        for fd in _connected_sockets() - before if before is not None else ():
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Free the peers that wait in a collective with this rank."""
        # The lock is left with sockets only: a group that this thread still named would look like one a role holds.
        with self._lock:
            sockets = [connection for made in self._made.values() for connection in made.sockets]
        for connection in sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer has closed it already, or this worker has
                pass

    def renew(self, hold: int) -> list[str]:
        """Drop all groups, so that the next ones are new; the names of roles that still hold an old one."""
        self._epoch = hold
        if not self._made:
            return []
        self.cut()
        with self._lock:
            groups, self._made = self._made, {}
        old = [(weakref.ref(made.group), made.role) for made in groups.values()]
        if any(made.default for made in groups.values()):
            _forget_all(self._alone)  # with the default group torch forgets all others
        _forget_all(groups)
        gc.collect()  # a role's frames may be part of cycles
        deadline = time.monotonic() + _LETS_GO_S
        while any(group() is not None for group, _ in old) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # gloo's own threads let go a moment after they have told who waits for them
        return sorted({role or "group.run" for group, role in old if group() is not None})

    def close(self) -> None:
        """Drop all groups: the worker ends."""
        self.cut()
        _forget_all(self._made)
        _forget_all(self._alone)


def axis_free(name: str) -> bool:
    """Whether a group's name is that of all ranks of a role."""
    return name.endswith("/*")


def single_rank_group() -> ProcessGroup:
    """A group of this process alone, shared by all role objects outside any worker."""
    import torch.distributed as dist

    with _alone_lock:
        if not _alone:
            _alone.append(_new_group(dist, _hash_store(), 0, 1, "colocate/alone", "gloo"))
        return _alone[0]


def _members(ctx: Context, axis: str | None) -> tuple[int, int, str]:
    """How many share the group, which of them this rank is, and a name that they agree on."""
    role = ctx.role or ""
    if axis is None:
        return ctx.world_size, ctx.rank, f"{role}/*"
    mesh, place, axis = _place(ctx, axis)
    if place is None:
        return 1, 0, f"{role}/{axis}/{ctx.rank}"
    others = [f"{other}={place.rank(other)}" for other in place.shape if other != axis]
    return place.size(axis), place.rank(axis), f"{role}/{mesh}.{axis}/{','.join(others)}"


def _place(ctx: Context, axis: str) -> tuple[str, MeshPlace | None, str]:
    """The mesh that an axis belongs to, by name and as this rank lies in it, and the axis without the mesh's name."""
    named, dot, rest = axis.rpartition(".")
    if dot:
        if named not in ctx.meshes:
            raise ConfigError(
                f"ctx.process_group({axis!r}): role {ctx.role!r} has no mesh {named!r}{did_you_mean(named, ctx.meshes)}"
            )
        return (named, ctx.meshes[named], rest) if rest in ctx.meshes[named].shape else (named, None, rest)
    found = [(name, place) for name, place in ctx.meshes.items() if axis in place.shape]
    if len(found) > 1:
        known = " or ".join(repr(f"{name}.{axis}") for name, _ in found)
        raise ConfigError(
            f"ctx.process_group({axis!r}): several meshes of role {ctx.role!r} have such an axis; say which: {known}"
        )
    return (*found[0], axis) if found else ("", None, axis)


def _new_group(dist: Any, store: Any, rank: int, size: int, name: str, backend: str) -> ProcessGroup:
    # The public API makes groups only inside the default one, which colocate leaves to the user. This is what
    # init_process_group itself does, and what makes broadcast(group_src=) work. (group.rank() tells the rank; torch's
    # get_rank(group) wants a default group whatever it is given.)
    from torch.distributed import distributed_c10d as c10d

    made, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), store, group_name=c10d.GroupName(name), timeout=_TIMEOUT
    )
    c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
    group: ProcessGroup = made
    return group


def _forget_all(groups: dict[tuple[Any, ...], _Made]) -> None:
    while groups:
        _, made = groups.popitem()
        _forget(made)
        del made


def _forget(made: _Made) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for connection in made.sockets:
        connection.close()
    if made.default:
        dist.destroy_process_group()
        return
    world = c10d._world
    name = world.pg_names.get(made.group)
    if name is not None:  # gone with the default group
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]  # as the group was registered, by torch itself
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(made.group, None)
    for tag, tagged in list(world.tags_to_pg.items()):
        world.tags_to_pg[tag] = [group for group in tagged if group is not made.group]


def _hash_store() -> Any:
    import torch.distributed as dist

    return dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so


def _connected_sockets() -> set[int]:
    """Descriptors of this process's connected TCP sockets that aren't colocate's own."""
    found = set()
    own = wire.own_descriptors()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as probe:
                if probe.family in (socket.AF_INET, socket.AF_INET6) and probe.type == socket.SOCK_STREAM:
                    probe.getpeername()
                    found.add(int(entry))
        except OSError:  # closed meanwhile, or not connected
            continue
    return found - own


def _duplicate(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))
