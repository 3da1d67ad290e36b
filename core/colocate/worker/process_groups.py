"""torch.distributed groups of a role's ranks: set up without a port race, cut when a call fails, renewed after a hold.

Rank 0 of the group binds a free loopback or node port itself. Its ranks meet at the driver, which tells all of them the
address once all are there; then each makes its half in a thread of its own, so that the lane can leave at any time. A
gloo group whose rank has raised is cut by shutting its sockets down, which frees peers that wait in a collective at
once (destroying the group frees nobody while a reference lives); `collective_waits` frees whom gloo forgets.
"""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._protocol.messages import Meet
from colocate._role.context import Context, MeshPlace
from colocate._role.torch_groups import (
    Made,
    Plan,
    forget,
    forget_all,
    has_default,
    hash_store,
    lost_a_peer,
    make_default,
)
from colocate._system.limits import GROUPS_CLOSE_WITHIN_S
from colocate._system.nearest import did_you_mean
from colocate.errors import CapabilityError, ConfigError
from colocate.worker.collective_waits import bury, guard
from colocate.worker.failure import LOOKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Worker(Protocol):
    """What groups need of the worker that they are of."""

    def ask(self, question: Message) -> Any:
        """Ask the driver."""

    def asking(self) -> int | None:
        """The number of the call that asks; None for none."""
        ...

    def why_not(self) -> str | None:
        """Why the call that asks mustn't wait for its peers; None when it may."""
        ...


class ProcessGroups:
    """The groups of one worker, by role and axis. Used on the lane; `end_waits` and `cut` from any thread."""

    def __init__(self, worker: Worker, in_process: bool, host: str = "127.0.0.1") -> None:
        """Make none yet.

        Args:
            worker: Whose they are.
            in_process: The workers are threads of one process, which torch can give no groups of their own.
            host: Address under which the other ranks reach this machine.
        """
        self._worker = worker
        self._in_process = in_process
        self._host = host
        self._made: dict[tuple[Any, ...], Made] = {}
        self._lock = threading.Lock()
        self._alone: dict[tuple[Any, ...], Made] = {}  # of one rank: no failure elsewhere touches them
        self._making: tuple[int, Future[str | None]] | None = None  # for which call; why it was left, if it was
        self._not_made = False
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
        if found is None:
            if default and has_default():
                raise ConfigError(
                    f"role {ctx.role!r} of group {ctx.group!r} is to make torch's default process group, but there is "
                    "one in this process already: leave init_process_group() to colocate",
                    role=ctx.role,
                )
            board = f"{ctx.group}/{self.generation}/{self._epoch}/{name}"
            backend = "nccl" if str(ctx.device).startswith("cuda") else "gloo"
            plan = Plan(ctx.role, board, members, index, default, backend)
            if members == 1:
                groups[key] = plan.make(hash_store())
            else:
                self._make_together(plan, key)
            found = groups[key]
            if default:
                make_default(found.group)
        found.asked = self._worker.asking()
        return found.group

    def _make_together(self, plan: Plan, key: tuple[Any, ...]) -> None:
        listener = socket.create_server((self._host, 0)) if plan.index == 0 else None
        try:
            address = listener and listener.getsockname()[:2]
            host, port = self._worker.ask(Meet(plan.board, plan.members, address))
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        left: Future[str | None] = Future()
        with self._lock:
            self._making = self._worker.asking() or 0, left

        def make() -> None:
            try:
                made = plan.make(plan.store(host, port, listener))
            except Exception as error:
                with self._lock:
                    if not left.done():
                        self._not_made = True
                        left.set_exception(error)
                return
            with self._lock:
                if not left.done():
                    self._made[key] = made
                    del made  # when the lane goes on, nobody but it has the group
                    left.set_result(None)
                    return
            forget(made)

        if plan.backend == "gloo":
            guard(self._hopeless)
        # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish its half.
        threading.Thread(target=make, name="colocate-process-group", daemon=True).start()
        reason = self._worker.why_not()
        if reason is not None:
            self.end_waits(-1, reason)
        reason = left.result()
        if reason is not None:
            raise Consequence(reason)

    def end_waits(self, seq: int, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in a call from `seq` on: they may never come."""
        with self._lock:
            if self._making is not None and self._making[0] >= seq and not self._making[1].done():
                self._making[1].set_result(reason)

    def _hopeless(self) -> str | None:
        reason = self._worker.why_not()
        if reason is None:
            return None
        # A group that this call hasn't asked for may have been cut by a call that has nothing to do with it.
        seq, groups = self._worker.asking(), list(self._made.values())
        return reason if lost_a_peer([made for made in groups if made.asked == seq] or groups) else None

    def lost_a_peer(self) -> bool:
        """Whether a peer has left, or died: then this rank's failure is only a consequence.

        All were there to make a group that couldn't be made; or the other end of a connection is gone.
        """
        return self._not_made or lost_a_peer(list(self._made.values()))

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
        self._epoch, self._not_made, self._making = hold, False, None
        if not self._made:
            return []
        self.cut()
        with self._lock:
            groups, self._made = self._made, {}
        old = [(weakref.ref(made.group), made.role) for made in groups.values()]
        if any(made.default for made in groups.values()):
            forget_all(self._alone)  # with the default group torch forgets all others
        left = forget_all(groups)
        with LOOKING:  # whoever looked at the lane's frames before has let go of them
            pass
        gc.collect()  # a role's frames may be part of cycles
        holders = sorted({role or "group.run" for group, role in old if group() is not None})
        bury(left)
        return holders

    def close(self) -> None:
        """Drop all groups: the worker ends."""
        self.cut()
        bury([*forget_all(self._made), *forget_all(self._alone)], GROUPS_CLOSE_WITHIN_S)


def axis_free(name: str) -> bool:
    """Whether a group's name is that of all ranks of a role."""
    return name.endswith("/*")


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
