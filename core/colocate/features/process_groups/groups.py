"""Process groups of a worker: made without a port race, cut only if a peer would wait forever, and renewed.

The slots of a group have one default process group, and the groups of all roles are parts of it. A role's
group is made by its ranks: they meet at a store, and wait on separate threads, so that a lane can
leave (`making`).

After a failure, a group stays usable if all its ranks have begun equally many operations. A rank that has failed,
or is held, begins no more, and reports its count: a rank that has begun more waits in vain, and cuts the
group. With gloo, a cut shuts the sockets down, which frees waits in collectives at once (destroying the
group frees nobody while a reference lives; `waits` frees those that gloo forgets); with NCCL, a cut is an abort.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from colocate._role.context import Context
from colocate._system.limits import GROUPS_CLOSE_WITHIN_S, LOOKS_AT_GROUPS_EVERY_S
from colocate._system.nearest import did_you_mean
from colocate._system.threads import Thread
from colocate.errors import CapabilityError, ConfigError
from colocate.features.process_groups import books, torch_groups, works
from colocate.features.process_groups.making import DefaultGroup, Made, Making, Together
from colocate.features.process_groups.messages import Operations
from colocate.features.process_groups.torch_groups import Plan
from colocate.features.process_groups.usable import Usable
from colocate.features.process_groups.waits import destroy_later, guard, transferring
from colocate.gpus import backend_for, number_of
from colocate.worker.context import WorkerContext
from colocate.worker.serving.failure import LOOKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class ProcessGroups:
    """The groups of one worker. Used on the lane; methods that end waits or cut groups run on any thread.

    Attributes:
        default: The default group.
        cuts: The number of cuts so far.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Prepare without any group. With workers as threads of one process, torch can't give them separate groups."""
        boot = worker.boot
        self._worker, self._in_process = worker, worker.in_process
        self._group, self._slot, self._device = boot.group, boot.slot, boot.device
        self._making = Making(worker)
        self.end_waits = self._making.end_waits
        self.default = DefaultGroup(worker, self._making)
        self._lock = threading.Lock()
        self._made: dict[str, Made] = {}
        self._asked: dict[tuple[str | None, str | None], None] = {}  # by role and axis, in order of requests
        self._meshes: dict[tuple[str | None, str], DeviceMesh] = {}
        self._former_meshes: dict[tuple[str | None, str], weakref.ref[DeviceMesh]] = {}
        self._usable = Usable(worker.lane.last_hold)
        self._watching: threading.Event | None = None
        self._dropped: list[tuple[weakref.ref[ProcessGroup], str]] = []
        self._left: list[Any] = []  # the backends of dropped groups
        self.cuts = 0

    def watch_collectives(self) -> None:
        """Record all groups of this process and all operations there. Requires torch."""
        books.record()
        works.record()
        torch_groups.take_up()
        if backend_for(self._device) is None:
            guard(self._hopeless)

    # -- what roles ask for

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        """Return the group of the role's ranks along an axis; made when all these ranks ask."""
        slots, index, name = _members(ctx, axis)
        if self._in_process and len(slots) > 1:
            raise _needs_processes(f"ctx.process_group() of {len(slots)} ranks", ctx)
        entry = self._made.get(name)
        if entry is None:
            self._asked[ctx.role, axis] = None
            if not self._in_process:
                self.default.have()
            rendezvous_key = f"{ctx.group}/{ctx.generation}/{self._usable.epoch}/{name}"
            whole, timeout_s = f"{ctx.group}/{name}", self._worker.collective_timeout
            plan = Plan(whole, rendezvous_key, slots, index, False, not self._in_process, self._device, timeout_s)
            if len(slots) == 1:
                self._made[name] = Made(plan.make(torch_groups.hash_store()))
            else:
                self._making.have(Together(name, plan, self.default.rendezvous(), self._made))
            entry = self._made[name]
        entry.asked = self._worker.asking()
        return entry.group

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        """Return a torch mesh of the role, with groups along the mesh's axes."""
        from torch import tensor
        from torch.distributed.device_mesh import DeviceMesh

        if self._in_process and ctx.world_size > 1:
            raise _needs_processes(f"ctx.device_mesh() of {ctx.world_size} ranks", ctx)
        if name is None and len(ctx.meshes) == 1:
            (name,) = ctx.meshes
        if name is None or name not in ctx.meshes:
            names = " or ".join(repr(mesh_name) for mesh_name in ctx.meshes if mesh_name) or "none that has a name"
            argument = "" if name is None else repr(name)
            meant = did_you_mean(name, ctx.meshes) if name else ""
            raise ConfigError(f"ctx.device_mesh({argument}): role {ctx.role!r} has {names}; say which{meant}")
        which, place = name, ctx.meshes[name]
        result = self._meshes.get((ctx.role, which))
        if result is None:
            self.have_default()
            if not self._in_process:
                books.tell_apart()
            prefix = f"{which}." if which else ""
            axes = tuple(place.shape)
            groups = [self.get(ctx, prefix + axis) for axis in axes]
            ranks = [0] if self._in_process else list(ctx.slots)
            # Reuse a former mesh object if anybody still holds one. Torch's caches treat another mesh as equal, and
            # would put tensors of the new mesh on the former one.
            reference = self._former_meshes.pop((ctx.role, which), None)
            former = None if reference is None else reference()
            if former is not None and books.point(former, groups):
                result = former
            else:
                result = DeviceMesh.from_group(
                    groups,
                    self._device.partition(":")[0],
                    mesh=tensor(ranks).reshape([*place.shape.values()]),
                    mesh_dim_names=axes,
                )
            self._meshes[ctx.role, which] = result
        return result

    def make_again(self, ctx: Context) -> None:
        """Make a role's former groups again, in the order of the first requests, on all ranks."""
        self.have_default()
        for axis in [axis for role, axis in self._asked if role == ctx.role]:
            self.get(ctx, axis)

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of the group's store on slot 0."""
        self.have_default()
        return self.default.rendezvous()

    def torchrun_environment(self, nodes: Sequence[int]) -> dict[str, str]:
        """Return torchrun's environment variables; `nodes` has a number per slot, equal for slots on one node."""
        host, port = self.rendezvous()
        local_slots = [slot for slot, node in enumerate(nodes) if node == nodes[self._slot]]
        # Libraries use this as the device's number, too, although a worker may see only one device.
        local_rank = local_slots.index(self._slot) if backend_for(self._device) is None else number_of(self._device)
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self._slot),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(local_slots)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already
            "TORCHELASTIC_RESTART_COUNT": str(self._worker.boot.generation),
        }

    def have_default(self) -> None:
        """Make the default group if missing; workers on threads share the process's."""
        if self._in_process:
            self.default.share()
        else:
            self.default.have()

    def count(self) -> int:
        """Return the number of operations that this rank has begun on all groups."""
        return 0 if self._in_process else books.count()

    # -- after a failure

    def _hopeless(self) -> str | None:
        reason = self._worker.why_not()
        if reason is None:
            return None
        # Another call, without relation to this one, may have cut a group that this call hasn't asked for.
        seq, entries = self._worker.asking(), dict(self._made)
        names = [name for name, entry in entries.items() if entry.asked == seq] or [*entries]
        return reason if books.lost_a_peer(f"{self._group}/{name}" for name in names) else None

    def lost_a_peer(self) -> bool:
        """Return whether a peer has left or died: this rank's failure is only a consequence then.

        Either a group couldn't be made because a rank left, or the other end of a connection is gone.
        """
        fails = self._making.failed_in == self._worker.asking() or bool(self._usable.cuts)
        return fails or books.lost_a_peer(self.operations())

    def operations(self) -> Operations:
        """Return the number of operations that this rank has begun on each group, including groups made by roles."""
        if self._in_process:  # the process's groups aren't this worker's alone
            return {}
        with LOOKING:
            counts, unfinished = books.operations(), self._making.unfinished()
            return {name: count for name, count in counts.items() if name not in unfinished}

    def left(self, hold: int, slot: int, operations: Operations) -> None:
        """Record that another rank begins no operations until the hold is over, and free this rank's futile waits."""
        with self._lock:
            if not self._usable.left(hold, slot, operations):
                return
            over, begins = self._watching, self._watching is None and books.are_any()
            if over is None:
                over = threading.Event()
            if begins:
                self._watching = over
        self._free_those_that_wait()
        if begins:
            # The running call may start another wait at any moment, until this rank is back.
            Thread(target=self._watch, args=(over,), name="colocate-process-groups").start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOKS_AT_GROUPS_EVERY_S):
            self._free_those_that_wait()

    def _free_those_that_wait(self) -> None:
        """Cut groups on which this rank has begun operations that can't end, since other ranks begin no more."""
        with LOOKING:  # until done: dropping groups, and making new ones of the same names, waits for this
            begun, sent = books.operations(), books.with_transfers() if transferring else ()
            with self._lock:
                vain = self._usable.vain(begun, books.members)
                # Transfers aren't counted per peer: any lost member makes the wait futile.
                vain.update(name for name in sent if self._usable.shares(books.members(name)))
            self._cut_those(vain - self._usable.cuts - self._making.unfinished())

    def cut(self, waits: Callable[[], bool] = lambda: True) -> None:
        """Cut all groups in use, which frees this rank and peers from waits in collectives.

        `waits` tells whether this rank may still wait. It runs under the lock that excludes `back`: groups cut after
        `back` would be taken for whole.
        """
        with LOOKING:
            if waits():
                self._cut_those([name for name, (count, _) in self.operations().items() if count])

    def _cut_those(self, names: Collection[str]) -> threading.Thread | None:
        """Record and cut groups; return the thread of an unfinished abort, if any."""
        with self._lock:
            self._usable.cuts.update(names)
        self.cuts += len(names)
        return books.cut(names)

    def back(self, hold: int) -> tuple[Operations, list[str]]:
        """Return this idle rank's counts of operations and the names of cut groups. On the lane."""
        self._making.back()
        with self._lock:
            self._usable.back(hold)
            over, self._watching = self._watching, None
        if over is not None:
            over.set()
        operations = self.operations()  # taking the lock waits for a cut in progress
        return operations, sorted(self._usable.cuts)

    def concerns(self, names: Sequence[str], role: str) -> bool:
        """Return whether a role uses one of these groups: a group of the role, of role code, or the default one."""
        whole, role_prefix = f"{self._group}/", f"{self._group}/{role}/"
        return any(
            name.startswith(role_prefix) or not name.startswith(whole) or name == self.default.name for name in names
        )

    def about_to_drop(self, names: Sequence[str]) -> None:
        """Prepare for a drop on the lane; from any thread."""
        if self.default.name in names:
            self.default.about_to_drop()

    def drop(self, names: Sequence[str]) -> None:
        """Drop broken groups, so that the next ones are new. On the lane."""
        with LOOKING:  # waits for a cut in progress; later ones find no group
            pass
        whole = self.default.name in names
        if whole:  # torch forgets all others together with the default group
            names = [*books.all_groups()]
        if (rest := books.cut(names)) is not None:  # waits for the abort on devices
            rest.join()
        self._former_meshes.update({key: weakref.ref(mesh) for key, mesh in self._meshes.items()})
        self._meshes.clear()
        for name in names:
            self._made.pop(name.removeprefix(f"{self._group}/"), None)
            if (reference := books.reference(name)) is not None:
                self._dropped.append((reference, name))
            self._left += books.forget(name)
        with self._lock:
            self._usable.cuts.update(names)  # until the roles are renewed: another driver asks again
        self.default.dropped(self._usable.epoch if whole else None)

    def renewed(self) -> None:
        """Clear the record of cuts: the roles go on without the dropped groups."""
        with self._lock:
            self._usable.cuts.clear()

    def holders(self) -> list[str]:
        """Return the dropped groups that somebody still holds, and clear the record of drops. On the lane."""
        dropped, self._dropped = self._dropped, []
        if dropped:
            with LOOKING:  # waits for a look at the lane's frames, which references groups
                pass
            gc.collect()  # a role's frames may be in reference cycles
        # Only now: a model that drops the last reference on the lane would wait for running operations.
        destroy_later(self._left)
        return sorted({name for group, name in dropped if group() is not None})

    def ending(self) -> None:
        """End all waits for peers: the worker is about to end. From any thread."""
        self._making.give_up()
        self.cut()

    def close(self) -> None:
        """Drop all groups at the worker's end."""
        self._making.close(GROUPS_CLOSE_WITHIN_S)
        self._meshes.clear()
        names = [f"{self._group}/{name}" for name in self._made]
        self._made.clear()
        if self._in_process:
            backends = [backend for name in names for backend in books.forget(name)]
            backends += self.default.unshare()
        else:
            # Unused groups as well: dropping the last reference to an uncut NCCL group would block.
            with LOOKING:
                rest = self._cut_those(books.all_groups())
            if rest is not None:
                rest.join(GROUPS_CLOSE_WITHIN_S)
                if rest.is_alive():  # NCCL takes a second for each group, and forever if a kernel doesn't end
                    return  # the process's end cleans up
            backends = books.forget_all()
        destroy_later(backends, GROUPS_CLOSE_WITHIN_S)


def _needs_processes(what: str, ctx: Context) -> CapabilityError:
    return CapabilityError(
        f"{what} needs a process each, but the slots of group {ctx.group!r} are threads of one: use "
        "connect('local', processes=True), in a config executor.with.processes=true",
        capability="OwnProcess",
        executors=("local with processes=True",),
        role=ctx.role,
        rank=ctx.rank,
    )


def _members(ctx: Context, axis: str | None) -> tuple[Sequence[int], int, str]:
    """Return the slots of a group, this rank's index there, and a name that is equal on all these slots."""
    role, mesh = ctx.role or "", ""
    if axis is None:
        return ctx.slots, ctx.rank, f"{role}/*"
    named, dot, rest = axis.rpartition(".")
    if dot:
        if named not in ctx.meshes:
            raise ConfigError(
                f"ctx.process_group({axis!r}): role {ctx.role!r} has no mesh {named!r}{did_you_mean(named, ctx.meshes)}"
            )
        mesh, axis = named, rest
        place = ctx.meshes[named] if rest in ctx.meshes[named].shape else None
    else:
        matches = [(name, mesh_shape) for name, mesh_shape in ctx.meshes.items() if axis in mesh_shape.shape]
        if len(matches) > 1:
            choices = " or ".join(repr(f"{name}.{axis}") for name, _ in matches)
            raise ConfigError(
                f"ctx.process_group({axis!r}): several meshes of role {ctx.role!r} have such an axis; say which: "
                f"{choices}"
            )
        mesh, place = matches[0] if matches else ("", None)
    if place is None:
        return [ctx.slot], 0, f"{role}/{axis}/{ctx.rank}"
    if place.size(axis) == ctx.world_size:
        return ctx.slots, ctx.rank, f"{role}/*"
    ranks = place.mesh.line(ctx.rank, axis)
    coordinates = [f"{other}={place.rank(other)}" for other in place.shape if other != axis]
    return [ctx.slots[rank] for rank in ranks], place.rank(axis), f"{role}/{mesh}.{axis}/{','.join(coordinates)}"
