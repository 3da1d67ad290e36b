"""torch.distributed groups of a worker: made without a port race, cut only where a peer would wait for ever, renewed.

The slots of a group have one default process group, in which the groups of all roles lie. A role's
group is made by the ranks that are in it. They meet at a store, and wait on threads of their own, so that a lane can
leave (`making`).

After a failure a group is of use as long as all its ranks have begun as many operations on it. A rank that has failed,
or is held, begins none any more, and says how many it had begun: who has begun more waits for it in vain, and cuts the
group. With gloo that means shutting its sockets down, which frees who waits in a collective at once (destroying the
group frees nobody while a reference lives; `waits` frees whom gloo forgets), with NCCL an abort.
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
    """The groups of one worker. Used on the lane; what ends waits, looks and cuts comes from any thread.

    Attributes:
        default: The default one.
        cuts: How often one was cut.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Make none yet. Where workers are threads of one process, torch can give them no groups of their own."""
        boot = worker.boot
        self._worker, self._in_process = worker, worker.in_process
        self._group, self._slot, self._device = boot.group, boot.slot, boot.device
        self._making = Making(worker)
        self.end_waits = self._making.end_waits
        self.default = DefaultGroup(worker, self._making)
        self._lock = threading.Lock()
        self._made: dict[str, Made] = {}
        self._asked: dict[tuple[str | None, str | None], None] = {}  # by role and axis, in order
        self._meshes: dict[tuple[str | None, str], DeviceMesh] = {}
        self._former_meshes: dict[tuple[str | None, str], weakref.ref[DeviceMesh]] = {}
        self._usable = Usable(worker.lane.last_hold)
        self._watching: threading.Event | None = None
        self._dropped: list[tuple[weakref.ref[ProcessGroup], str]] = []
        self._left: list[Any] = []  # the backends of these
        self.cuts = 0

    def watch_collectives(self) -> None:
        """Know all groups of this process and what is done on them, whoever makes them. Torch is there."""
        books.record()
        works.record()
        torch_groups.take_up()
        if backend_for(self._device) is None:
            guard(self._hopeless)

    # -- what roles ask for

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        """The group of the role's ranks along an axis; made when all of them ask."""
        slots, index, name = _members(ctx, axis)
        if self._in_process and len(slots) > 1:
            raise _needs_processes(f"ctx.process_group() of {len(slots)} ranks", ctx)
        found = self._made.get(name)
        if found is None:
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
            found = self._made[name]
        found.asked = self._worker.asking()
        return found.group

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        """A mesh of the role as torch has them; its groups are those of the mesh's axes."""
        from torch import tensor
        from torch.distributed.device_mesh import DeviceMesh

        if self._in_process and ctx.world_size > 1:
            raise _needs_processes(f"ctx.device_mesh() of {ctx.world_size} ranks", ctx)
        if name is None and len(ctx.meshes) == 1:
            (name,) = ctx.meshes
        if name is None or name not in ctx.meshes:
            known = " or ".join(repr(each) for each in ctx.meshes if each) or "none that has a name"
            asked = "" if name is None else repr(name)
            meant = did_you_mean(name, ctx.meshes) if name else ""
            raise ConfigError(f"ctx.device_mesh({asked}): role {ctx.role!r} has {known}; say which{meant}")
        which, place = name, ctx.meshes[name]
        found = self._meshes.get((ctx.role, which))
        if found is None:
            self.have_default()
            if not self._in_process:
                books.tell_apart()
            prefix = f"{which}." if which else ""
            axes = tuple(place.shape)
            groups = [self.get(ctx, prefix + axis) for axis in axes]
            ranks = [0] if self._in_process else list(ctx.slots)
            # The same object again, as long as anybody has it: to torch's caches of how tensors lie on meshes, another
            # one would be equal to it, so that tensors on the new one would become tensors on the former.
            reference = self._former_meshes.pop((ctx.role, which), None)
            former = None if reference is None else reference()
            if former is not None and books.point(former, groups):
                found = former
            else:
                found = DeviceMesh.from_group(
                    groups,
                    self._device.partition(":")[0],
                    mesh=tensor(ranks).reshape([*place.shape.values()]),
                    mesh_dim_names=axes,
                )
            self._meshes[ctx.role, which] = found
        return found

    def make_again(self, ctx: Context) -> None:
        """Make those that a role had before: in the order in which it had asked for them, on all its ranks."""
        self.have_default()
        for axis in [axis for role, axis in self._asked if role == ctx.role]:
            self.get(ctx, axis)

    def rendezvous(self) -> tuple[str, int]:
        """Where the store of the group's slots listens, on slot 0."""
        self.have_default()
        return self.default.rendezvous()

    def torchrun_environment(self, nodes: Sequence[int]) -> dict[str, str]:
        """Return the variables that torchrun sets; `nodes` tells by a number for each slot which lie on one node."""
        host, port = self.rendezvous()
        here = [each for each, node in enumerate(nodes) if node == nodes[self._slot]]
        # Libraries take it for the device's number, too; a worker may see but its own.
        local_rank = here.index(self._slot) if backend_for(self._device) is None else number_of(self._device)
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self._slot),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already
            "TORCHELASTIC_RESTART_COUNT": str(self._worker.boot.generation),
        }

    def have_default(self) -> None:
        """Have the default group made, unless it is there; threads share that of their process."""
        if self._in_process:
            self.default.share()
        else:
            self.default.have()

    def count(self) -> int:
        """How many operations this rank has begun on all groups; a role that changes that shares something."""
        return 0 if self._in_process else books.count()

    # -- after a failure

    def _hopeless(self) -> str | None:
        reason = self._worker.why_not()
        if reason is None:
            return None
        # A group that this call hasn't asked for may have been cut by a call that has nothing to do with it.
        seq, made = self._worker.asking(), dict(self._made)
        names = [name for name, each in made.items() if each.asked == seq] or [*made]
        return reason if books.lost_a_peer(f"{self._group}/{name}" for name in names) else None

    def lost_a_peer(self) -> bool:
        """Whether a peer has left, or died: then this rank's failure is only a consequence.

        All were there to make a group that couldn't be made; or the other end of a connection is gone.
        """
        fails = self._making.failed_in == self._worker.asking() or bool(self._usable.cuts)
        return fails or books.lost_a_peer(self.operations())

    def operations(self) -> Operations:
        """Return how many operations this rank has begun on each of its groups, whoever has made them."""
        if self._in_process:  # those of several ranks aren't this worker's
            return {}
        with LOOKING:
            found, unfinished = books.operations(), self._making.unfinished()
            return {name: told for name, told in found.items() if name not in unfinished}

    def left(self, hold: int, slot: int, operations: Operations) -> None:
        """Another rank begins nothing any more until the hold is over: nobody is to wait for it."""
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
            # What a call does next isn't seen from here: it may begin to wait at any moment until it is back.
            Thread(target=self._watch, args=(over,), name="colocate-process-groups").start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOKS_AT_GROUPS_EVERY_S):
            self._free_those_that_wait()

    def _free_those_that_wait(self) -> None:
        """Cut the groups on which this rank has begun more operations than can end: some ranks begin none any more."""
        with LOOKING:  # until it is done: who drops groups, and makes others of the same names, waits for that
            begun, sent = books.operations(), books.with_transfers() if transferring else ()
            with self._lock:
                vain = self._usable.vain(begun, books.members)
                # Transfers nobody counts: with whom isn't known either.
                vain.update(name for name in sent if self._usable.shares(books.members(name)))
            self._cut_those(vain - self._usable.cuts - self._making.unfinished())

    def cut(self, waits: Callable[[], bool] = lambda: True) -> None:
        """Cut all groups in use, so that this rank and its peers are freed where they wait in a collective.

        Whether this rank may still wait is asked where `back` can't come between: what were cut after that would be
        taken for whole.
        """
        with LOOKING:
            if waits():
                self._cut_those([name for name, (count, _) in self.operations().items() if count])

    def _cut_those(self, names: Collection[str]) -> threading.Thread | None:
        """Do it; what goes on with that, if not all is done."""
        with self._lock:
            self._usable.cuts.update(names)
        self.cuts += len(names)
        return books.cut(names)

    def back(self, hold: int) -> tuple[Operations, list[str]]:
        """This rank runs nothing: how many operations it has begun, and which groups it has cut. On the lane."""
        self._making.back()
        with self._lock:
            self._usable.back(hold)
            over, self._watching = self._watching, None
        if over is not None:
            over.set()
        operations = self.operations()  # and with that, who is about to cut has done so
        return operations, sorted(self._usable.cuts)

    def concerns(self, names: Sequence[str], role: str) -> bool:
        """Whether a role has to do with one of these groups: it is its own, or anybody's."""
        whole, own = f"{self._group}/", f"{self._group}/{role}/"
        return any(name.startswith(own) or not name.startswith(whole) or name == self.default.name for name in names)

    def about_to_drop(self, names: Sequence[str]) -> None:
        """The lane will be told to drop these groups; from any thread."""
        if self.default.name in names:
            self.default.about_to_drop()

    def drop(self, names: Sequence[str]) -> None:
        """Drop these groups, which are of no use any more, so that the next ones are new. On the lane."""
        with LOOKING:  # whoever looks for groups to cut has done so, and finds none any more
            pass
        whole = self.default.name in names
        if whole:  # with which torch forgets all others
            names = [*books.all_groups()]
        if (rest := books.cut(names)) is not None:  # what still runs on a device ends
            rest.join()
        self._former_meshes.update({key: weakref.ref(mesh) for key, mesh in self._meshes.items()})
        self._meshes.clear()
        for name in names:
            self._made.pop(name.removeprefix(f"{self._group}/"), None)
            if (found := books.reference(name)) is not None:
                self._dropped.append((found, name))
            self._left += books.forget(name)
        with self._lock:
            self._usable.cuts.update(names)  # until the roles have gone on: who comes after this driver asks again
        self.default.dropped(self._usable.epoch if whole else None)

    def renewed(self) -> None:
        """The roles go on without those that were dropped."""
        with self._lock:
            self._usable.cuts.clear()

    def holders(self) -> list[str]:
        """Return which of the dropped groups somebody still holds, and know none as dropped after that. On the lane."""
        dropped, self._dropped = self._dropped, []
        if dropped:
            with LOOKING:  # whoever looked at the lane's frames before has let go of them
                pass
            gc.collect()  # a role's frames may be part of cycles
        # Not before: a model that lets go of a group on the lane would be the last, and wait for what runs in it.
        destroy_later(self._left)
        return sorted({name for group, name in dropped if group() is not None})

    def ending(self) -> None:
        """The worker is about to end: nobody is waited for any more. From any thread."""
        self._making.give_up()
        self.cut()

    def close(self) -> None:
        """Drop all groups: the worker ends."""
        self._making.close(GROUPS_CLOSE_WITHIN_S)
        self._meshes.clear()
        names = [f"{self._group}/{name}" for name in self._made]
        self._made.clear()
        if self._in_process:
            left = [backend for name in names for backend in books.forget(name)]
            left += self.default.unshare()
        else:
            # Also those that nobody has used: with NCCL the last reference to one that wasn't cut would do it.
            with LOOKING:
                rest = self._cut_those(books.all_groups())
            if rest is not None:
                rest.join(GROUPS_CLOSE_WITHIN_S)
                if rest.is_alive():  # NCCL takes a second for each, and for ever where a kernel doesn't end: so would
                    return  # torch, and the process's end does it as well
            left = books.forget_all()
        destroy_later(left, GROUPS_CLOSE_WITHIN_S)


def _needs_processes(what: str, ctx: Context) -> CapabilityError:
    """The error where the slots are threads, which torch can give no groups of their own."""
    return CapabilityError(
        f"{what} needs a process each, but the slots of group {ctx.group!r} are threads of one: use "
        "connect('local', processes=True), in a config executor.with.processes=true",
        capability="OwnProcess",
        executors=("local with processes=True",),
        role=ctx.role,
        rank=ctx.rank,
    )


def _members(ctx: Context, axis: str | None) -> tuple[Sequence[int], int, str]:
    """Return the slots that share a group, which of them this rank is, and a name: the same on all of them."""
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
        found = [(name, each) for name, each in ctx.meshes.items() if axis in each.shape]
        if len(found) > 1:
            known = " or ".join(repr(f"{name}.{axis}") for name, _ in found)
            raise ConfigError(
                f"ctx.process_group({axis!r}): several meshes of role {ctx.role!r} have such an axis; say which: "
                f"{known}"
            )
        mesh, place = found[0] if found else ("", None)
    if place is None:
        return [ctx.slot], 0, f"{role}/{axis}/{ctx.rank}"
    if place.size(axis) == ctx.world_size:
        return ctx.slots, ctx.rank, f"{role}/*"
    ranks = place.mesh.line(ctx.rank, axis)
    others = [f"{other}={place.rank(other)}" for other in place.shape if other != axis]
    return [ctx.slots[rank] for rank in ranks], place.rank(axis), f"{role}/{mesh}.{axis}/{','.join(others)}"
