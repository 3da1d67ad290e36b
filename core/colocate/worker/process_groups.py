"""torch.distributed groups of a role's ranks: set up without a port race, cut when a call fails, renewed after a hold.

Rank 0 of the group binds a free loopback or node port itself. Its ranks meet at the driver, which tells all of them the
address once all are there: until then a hold ends their wait as it ends any, and after that nobody waits for long. A
gloo group whose rank has raised is cut by shutting its sockets down, which frees peers that wait in a collective at
once (destroying the group frees nobody while a reference lives); `collective_waits` frees whom gloo forgets.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs

from colocate import wire
from colocate._context import Context, MeshPlace
from colocate._mesh import did_you_mean
from colocate.errors import CapabilityError, ConfigError
from colocate.worker.collective_waits import bury, guard
from colocate.worker.consequence import Consequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = datetime.timedelta(minutes=30)
_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
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
    """The groups of one worker, by role and axis. Used on the lane; `interrupt` and `cut` from any thread."""

    def __init__(
        self,
        ask: Callable[..., Any],
        interruption: Callable[[], str | None],
        in_process: bool,
        host: str = "127.0.0.1",
    ) -> None:
        """Make none yet.

        Args:
            ask: Asks the driver.
            interruption: Why the call that asks mustn't wait for its peers; None when it may.
            in_process: The workers are threads of one process, which torch can give no groups of their own.
            host: Address under which the other ranks reach this machine.
        """
        self._ask = ask
        self._interruption = interruption
        self._in_process = in_process
        self._host = host
        self._made: dict[tuple[Any, ...], _Made] = {}
        self._lock = threading.Lock()
        self._alone: dict[tuple[Any, ...], _Made] = {}  # of one rank: no failure elsewhere touches them
        self._making: Future[None] | None = None
        self._peers_left = False
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
        default = axis_free(name) and ctx.role is not None and self.default_role == ctx.role
        groups = self._made if members > 1 or default else self._alone
        found = groups.get(key)
        if found is not None:
            return found.group
        board = f"{ctx.group}/{self.generation}/{self._epoch}/{name}"
        backend = "nccl" if str(ctx.device).startswith("cuda") else "gloo"
        plan = _Plan(ctx.role, board, members, index, default, backend)
        if members == 1:
            groups[key] = made = plan.make(_hash_store())
        else:
            made = self._meet(plan, key)
        if default:
            _make_default(made.group)
        return made.group

    def _meet(self, plan: _Plan, key: tuple[Any, ...]) -> _Made:
        listener = socket.create_server((self._host, 0)) if plan.index == 0 else None
        try:
            host, port = self._ask("meet", plan.board, plan.members, listener and listener.getsockname()[:2])
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        making: Future[None] = Future()
        with self._lock:
            self._making = making

        def make() -> None:
            try:
                made = plan.make(plan.store(host, port, listener))
            except Exception as error:
                with self._lock:
                    if not making.done():
                        self._peers_left = True  # all of them were there: one has failed since, or died
                        making.set_exception(error)
                return
            with self._lock:
                if not making.done():
                    self._made[key] = made
                    del made  # when the lane goes on, nobody but it has the group
                    making.set_result(None)
                    return
            _forget(made)

        if plan.backend == "gloo":
            guard(self._hopeless)
        # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish its half.
        threading.Thread(target=make, name="colocate-process-group", daemon=True).start()
        reason = self._interruption()
        if reason is not None:
            self.interrupt(reason)
        making.result()
        return self._made[key]

    def _hopeless(self) -> str | None:
        reason = self._interruption()
        return reason if reason is not None and self.lost_a_peer() else None

    def interrupt(self, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group: they have left."""
        with self._lock:
            if self._making is not None and not self._making.done():
                self._making.set_exception(Consequence(reason))

    def lost_a_peer(self) -> bool:
        """Whether the other end of a group's connection is gone: then this rank's failure is only a consequence."""
        poll = select.poll()
        for made in list(self._made.values()):
            for connection in made.sockets:
                if (fd := connection.fileno()) >= 0:
                    poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return self._peers_left or bool(poll.poll(0))

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
        self._epoch, self._peers_left = hold, False
        if not self._made:
            return []
        self.cut()
        with self._lock:
            groups, self._made = self._made, {}
        self._making = None
        old = [(weakref.ref(made.group), made.role) for made in groups.values()]
        if any(made.default for made in groups.values()):
            _forget_all(self._alone)  # with the default group torch forgets all others
        left = _forget_all(groups)
        gc.collect()  # a role's frames may be part of cycles
        holders = sorted({role or "group.run" for group, role in old if group() is not None})
        bury(left)
        return holders

    def close(self) -> None:
        """Drop all groups: the worker ends."""
        self.cut()
        bury([*_forget_all(self._made), *_forget_all(self._alone)])


@attrs.frozen
class _Plan:
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

    def make(self, store: Any) -> _Made:
        """Make it, together with all its ranks."""
        before = set(_connected_sockets())
        group = _new_group(store, self.index, self.members, self.board, self.backend)
        return _Made(group, self.role, _since(before) if self.members > 1 else [], self.default)


def axis_free(name: str) -> bool:
    """Whether a group's name is that of all ranks of a role."""
    return name.endswith("/*")


def single_rank_group() -> ProcessGroup:
    """A group of this process alone, shared by all role objects outside any worker."""
    with _alone_lock:
        if not _alone:
            _alone.append(_new_group(_hash_store(), 0, 1, "colocate/alone", "gloo"))
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


def _new_group(store: Any, rank: int, size: int, name: str, backend: str) -> ProcessGroup:
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


def _make_default(group: ProcessGroup) -> None:
    from torch.distributed import distributed_c10d as c10d

    c10d._update_default_pg(group)  # as init_process_group does


def _forget_all(groups: dict[tuple[Any, ...], _Made]) -> list[Any]:
    """Forget all of them; what is left of them is to be buried."""
    left = []
    while groups:
        _, made = groups.popitem()
        left += _forget(made)
        del made
    return left


def _forget(made: _Made) -> list[Any]:
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
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(made.group, None)
    for tag, tagged in list(world.tags_to_pg.items()):
        world.tags_to_pg[tag] = [group for group in tagged if group is not made.group]
    return left


def _gloo(group: ProcessGroup) -> list[Any]:
    from torch.distributed import ProcessGroupGloo

    backends = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in backends if isinstance(backend, ProcessGroupGloo)]


def _hash_store() -> Any:
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
