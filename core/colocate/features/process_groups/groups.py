"""The process groups of a worker: made for roles, cut (aborted) if a rank would wait forever, and dropped.

The slots of a group have one default process group, and the groups of all roles are parts of it. The ranks of a role
make a group together. They meet at a store and wait on separate threads, so that a lane can be called back (`making`).

After a failure, a group stays usable if all its ranks have started equally many operations. A rank that has failed or
is in a hold starts no more operations and reports its count. A rank that has started more operations would wait
forever, so it cuts the group. With gloo, a cut shuts the sockets down, which ends waits in collectives at once; `waits`
ends the waits that gloo doesn't end. Destroying the group would end no wait while a reference exists. With NCCL, a cut
is an abort.
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
from colocate.features.process_groups.making import DefaultGroup, GroupMaker, GroupRequest, RoleGroup
from colocate.features.process_groups.messages import Operations
from colocate.features.process_groups.torch_groups import ProcessGroupPlan
from colocate.features.process_groups.usable import UsableGroups
from colocate.features.process_groups.waits import destroy_later, guard_waits, transferring
from colocate.gpus import backend_for, number_of
from colocate.worker.context import WorkerContext
from colocate.worker.serving.failure import INSPECTION_LOCK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class ProcessGroups:
    """The process groups of one worker. Only methods that end waits or cut groups may run outside the lane.

    Attributes:
        default: The default group.
        cut_count: The number of cuts so far.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Start without any group. If workers are threads of one process, torch can't separate their groups."""
        boot = worker.boot
        self._worker, self._in_process = worker, worker.in_process
        self._group, self._slot, self._device = boot.group, boot.slot, boot.device
        self._making = GroupMaker(worker)
        self.end_waits = self._making.end_waits
        self.default = DefaultGroup(worker, self._making)
        self._lock = threading.Lock()
        self._groups_by_name: dict[str, RoleGroup] = {}
        # The requested groups as role and axis, in the order of the first requests.
        self._requests: dict[tuple[str | None, str | None], None] = {}
        self._meshes: dict[tuple[str | None, str], DeviceMesh] = {}
        self._former_meshes: dict[tuple[str | None, str], weakref.ref[DeviceMesh]] = {}
        self._usable = UsableGroups(worker.lane.last_hold)
        self._watch_over: threading.Event | None = None
        self._dropped: list[tuple[weakref.ref[ProcessGroup], str]] = []
        self._leftovers: list[Any] = []  # The backends of dropped groups.
        self.cut_count = 0

    def watch_collectives(self) -> None:
        """Start to record all groups and operations of this process. Torch must be imported."""
        books.start_recording()
        works.start_recording()
        torch_groups.adopt_default()
        if backend_for(self._device) is None:
            guard_waits(self._explain_hopeless)

    # -- what roles ask for

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        """Return the process group of a role's ranks along an axis. The group is made once all these ranks ask."""
        slots, index, name = _group_members(ctx, axis)
        if self._in_process and len(slots) > 1:
            raise _needs_processes(f"ctx.process_group() of {len(slots)} ranks", ctx)
        entry = self._groups_by_name.get(name)
        if entry is None:
            self._requests[ctx.role, axis] = None
            if not self._in_process:
                self.default.ensure_made()
            rendezvous_key = f"{ctx.group}/{ctx.generation}/{self._usable.epoch}/{name}"
            whole, timeout_s = f"{ctx.group}/{name}", self._worker.collective_timeout
            plan = ProcessGroupPlan(
                whole, rendezvous_key, slots, index, False, not self._in_process, self._device, timeout_s
            )
            if len(slots) == 1:
                self._groups_by_name[name] = RoleGroup(plan.make_group(torch_groups.create_hash_store()))
            else:
                self._making.ensure_group(GroupRequest(name, plan, self.default.rendezvous(), self._groups_by_name))
            entry = self._groups_by_name[name]
        entry.seq = self._worker.get_current_seq()
        return entry.group

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        """Return a device mesh of torch for a role, with a process group for each axis."""
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
            self.ensure_default()
            if not self._in_process:
                books.distinguish_meshes()
            prefix = f"{which}." if which else ""
            axes = tuple(place.shape)
            groups = [self.get(ctx, prefix + axis) for axis in axes]
            ranks = [0] if self._in_process else list(ctx.slots)
            # Reuse the former mesh object if role code still refers to that mesh.
            # Torch's caches treat a new mesh as equal, and would put tensors of the new mesh on the former mesh.
            reference = self._former_meshes.pop((ctx.role, which), None)
            former = None if reference is None else reference()
            if former is not None and books.repoint_mesh(former, groups):
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
        """Make all groups of a role again after a drop, on all ranks in the order of the first requests."""
        self.ensure_default()
        for axis in [axis for role, axis in self._requests if role == ctx.role]:
            self.get(ctx, axis)

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of the worker group's torch store, which slot 0 serves."""
        self.ensure_default()
        return self.default.rendezvous()

    def torchrun_environment(self, nodes: Sequence[int]) -> dict[str, str]:
        """Return torchrun's environment variables. `nodes` has each slot's node as a number."""
        host, port = self.rendezvous()
        local_slots = [slot for slot, node in enumerate(nodes) if node == nodes[self._slot]]
        # Libraries use the local rank as a device's number, too, although a worker may see only one device.
        local_rank = local_slots.index(self._slot) if backend_for(self._device) is None else number_of(self._device)
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self._slot),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(local_slots)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # Torch must not start a store, because slot 0 serves one already.
            "TORCHELASTIC_RESTART_COUNT": str(self._worker.boot.generation),
        }

    def ensure_default(self) -> None:
        """Make the default group unless there is one. Workers that are threads share the group of the process."""
        if self._in_process:
            self.default.share()
        else:
            self.default.ensure_made()

    def count_operations(self) -> int:
        """Return the number of operations that this rank has started on all groups."""
        return 0 if self._in_process else books.count_all()

    # -- after a failure

    def _explain_hopeless(self) -> str | None:
        reason = self._worker.get_wait_refusal()
        if reason is None:
            return None
        # Check only the groups of this call if there are any, because an unrelated call may have cut another group.
        seq, entries = self._worker.get_current_seq(), dict(self._groups_by_name)
        names = [name for name, entry in entries.items() if entry.seq == seq] or [*entries]
        return reason if books.has_lost_peer(f"{self._group}/{name}" for name in names) else None

    def has_lost_peer(self) -> bool:
        """Return whether a peer has left or died, so that this rank's failure is only a consequence.

        Then a group couldn't be made because a rank left, or the other end of a connection is closed.
        """
        fails = self._making.failed_in == self._worker.get_current_seq() or bool(self._usable.cuts)
        return fails or books.has_lost_peer(self.operations_by_group())

    def operations_by_group(self) -> Operations:
        """Return the number of started operations and the size of each process group, also of groups made by roles."""
        if self._in_process:  # Torch's groups belong to the whole process, not to this worker alone.
            return {}
        with INSPECTION_LOCK:
            counts, unfinished = books.count_operations(), self._making.list_unfinished()
            return {name: count for name, count in counts.items() if name not in unfinished}

    def on_peer_left(self, hold: int, slot: int, operations: Operations) -> None:
        """Record that another rank starts no operations until the hold ends, and end waits for that rank."""
        with self._lock:
            if not self._usable.on_peer_left(hold, slot, operations):
                return
            over, begins = self._watch_over, self._watch_over is None and books.has_groups()
            if over is None:
                over = threading.Event()
            if begins:
                self._watch_over = over
        self._cut_hopeless()
        if begins:
            # Keep checking until this rank is back, because the running call may start another wait at any time.
            Thread(target=self._watch_waits, args=(over,), name="colocate-process-groups").start()

    def _watch_waits(self, over: threading.Event) -> None:
        while not over.wait(LOOKS_AT_GROUPS_EVERY_S):
            self._cut_hopeless()

    def _cut_hopeless(self) -> None:
        """Cut (abort) process groups on which this rank waits for operations that other ranks never start."""
        with INSPECTION_LOCK:  # Nobody may drop or replace groups until the cuts are done.
            begun, sent = books.count_operations(), books.list_transferring() if transferring else ()
            with self._lock:
                vain = self._usable.find_hopeless(begun, books.list_members)
                # Sends aren't counted per peer, so a wait counts as futile if any member of the group has left.
                vain.update(name for name in sent if self._usable.includes_left(books.list_members(name)))
            self._cut_groups(vain - self._usable.cuts - self._making.list_unfinished())

    def cut_all(self, waits: Callable[[], bool] = lambda: True) -> None:
        """Cut (abort) all process groups in use, which ends the waits of this rank and of peers in collectives.

        `waits` returns whether this rank may still be waiting. It runs under the lock that excludes `back`, because
        groups that are cut after `back` would count as usable.
        """
        with INSPECTION_LOCK:
            if waits():
                self._cut_groups([name for name, (count, _) in self.operations_by_group().items() if count])

    def _cut_groups(self, names: Collection[str]) -> threading.Thread | None:
        """Cut (abort) process groups, record their names, and return the thread of an unfinished abort, or None."""
        with self._lock:
            self._usable.cuts.update(names)
        self.cut_count += len(names)
        return books.cut_groups(names)

    def enter_hold(self, hold: int) -> tuple[Operations, list[str]]:
        """Mark this rank as back, and return its counts of operations and the cut groups. Called on the idle lane."""
        self._making.wait_until_idle()
        with self._lock:
            self._usable.on_back(hold)
            over, self._watch_over = self._watch_over, None
        if over is not None:
            over.set()
        operations = self.operations_by_group()  # This takes the lock, and so waits for a cut in progress.
        return operations, sorted(self._usable.cuts)

    def concerns_role(self, names: Sequence[str], role: str) -> bool:
        """Return whether a role may use one of these groups, such as the default group or a group made by role code."""
        whole, role_prefix = f"{self._group}/", f"{self._group}/{role}/"
        return any(
            name.startswith(role_prefix) or not name.startswith(whole) or name == self.default.name for name in names
        )

    def expect_drop(self, names: Sequence[str]) -> None:
        """Record that the lane is about to drop groups. Called on any thread."""
        if self.default.name in names:
            self.default.expect_drop()

    def drop_groups(self, names: Sequence[str]) -> None:
        """Drop broken groups, so that the next requests make new groups. Called on the lane."""
        with INSPECTION_LOCK:  # Wait for a cut in progress. A later cut finds no group.
            pass
        whole = self.default.name in names
        if whole:  # Together with the default group, torch removes all other groups.
            names = [*books.list_groups()]
        if (rest := books.cut_groups(names)) is not None:  # Wait until the groups on devices are aborted.
            rest.join()
        self._former_meshes.update({key: weakref.ref(mesh) for key, mesh in self._meshes.items()})
        self._meshes.clear()
        for name in names:
            self._groups_by_name.pop(name.removeprefix(f"{self._group}/"), None)
            if (reference := books.get_reference(name)) is not None:
                self._dropped.append((reference, name))
            self._leftovers += books.forget_group(name)
        with self._lock:
            # Store the names until the roles are renewed, because another driver may repeat the request.
            self._usable.cuts.update(names)
        self.default.on_dropped(self._usable.epoch if whole else None)

    def on_renewed(self) -> None:
        """Clear the record of cuts, because the roles were renewed without the dropped groups."""
        with self._lock:
            self._usable.cuts.clear()

    def take_holders(self) -> list[str]:
        """Return the names of dropped groups that role code still refers to, and clear the record of drops."""
        dropped, self._dropped = self._dropped, []
        if dropped:
            with INSPECTION_LOCK:  # Wait for an inspection of the lane's stack frames, which may refer to groups.
                pass
            gc.collect()  # Stack frames of role code may be in reference cycles.
        # Drop these references last: otherwise a model on the lane could drop the last one, and wait for operations.
        destroy_later(self._leftovers)
        return sorted({name for group, name in dropped if group() is not None})

    def on_ending(self) -> None:
        """End all waits for peers, because the worker is about to end. Called on any thread."""
        self._making.abandon_waits()
        self.cut_all()

    def close(self) -> None:
        """Drop all groups at the worker's end."""
        self._making.close(GROUPS_CLOSE_WITHIN_S)
        self._meshes.clear()
        names = [f"{self._group}/{name}" for name in self._groups_by_name]
        self._groups_by_name.clear()
        if self._in_process:
            backends = [backend for name in names for backend in books.forget_group(name)]
            backends += self.default.unshare()
        else:
            # Cut unused groups, too, because dropping the last reference to an NCCL group without a cut would block.
            with INSPECTION_LOCK:
                rest = self._cut_groups(books.list_groups())
            if rest is not None:
                rest.join(GROUPS_CLOSE_WITHIN_S)
                if rest.is_alive():  # NCCL's abort takes a second for each group, and forever if a kernel doesn't end.
                    return  # The end of the process cleans up.
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


def _group_members(ctx: Context, axis: str | None) -> tuple[Sequence[int], int, str]:
    """Return the slots of a process group, this rank's index there, and a name that is equal on all these slots."""
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
