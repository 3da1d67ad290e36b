"""torch.distributed groups of a worker: made without a port race, cut only where a peer would wait for ever, renewed.

The slots of a group have one default process group, in which the groups of all roles lie. It is made when the first
role asks for any of them, by all slots at once, off their lanes: also by those whose roles don't ask. A role's group is
made by the ranks that are in it. They meet at the driver, and wait on threads of their own, so that a lane can leave.

After a failure a group is of use as long as all its ranks have begun as many operations on it. A rank that has failed,
or is held, begins none any more, and says how many it had begun: who has begun more waits for it in vain, and cuts the
group. With gloo that means shutting its sockets down, which frees who waits in a collective at once (destroying the
group frees nobody while a reference lives; `collective_waits` frees whom gloo forgets), with NCCL an abort.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._protocol.questions import Meet
from colocate._protocol.to_worker import Operations
from colocate._role import torch_books, torch_groups, torch_works
from colocate._role.context import Context, MeshPlace
from colocate._role.torch_groups import Plan
from colocate._system.jobs import message_of
from colocate._system.limits import GROUPS_CLOSE_WITHIN_S, LOOKS_AT_GROUPS_EVERY_S
from colocate._system.nearest import did_you_mean
from colocate.errors import CapabilityError, ColocateError, ConfigError
from colocate.gpus import backend_for
from colocate.worker.collective_waits import bury, guard, is_transferring
from colocate.worker.failure import LOOKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Worker(Protocol):
    """What groups need of the worker that they are of."""

    def ask(self, question: Message, apart: bool = False) -> Any:
        """Ask the driver."""

    def asking(self) -> int | None:
        """The number of the call that asks; None for none."""
        ...

    def why_not(self) -> str | None:
        """Why the call that asks mustn't wait for its peers; None when it may."""
        ...


@attrs.define(eq=False)
class _Made:
    """One of a role's groups; `asked` is the number of the last call that asked for it."""

    group: ProcessGroup
    asked: int | None = None


@attrs.define(eq=False)
class _Default:
    """The default group of the slots, there or in the making, and where its store listens.

    The store goes on when the group is renewed; slot 0 serves it as long as it keeps it.
    """

    epoch: int
    made: Future[None] = attrs.field(factory=Future)
    address: tuple[str, int] | None = None
    store: Any = None


class ProcessGroups:
    """The groups of one worker. Used on the lane; what ends waits, looks and cuts comes from any thread.

    Attributes:
        slots: How many the group has.
        generation: How often it has been restarted.
        timeout_s: How long an operation may take.
    """

    def __init__(
        self,
        worker: Worker,
        in_process: bool,
        group: str,
        slot: int = 0,
        host: str = "127.0.0.1",
        device: str = "cpu",
    ) -> None:
        """Make none yet.

        Args:
            worker: Whose they are.
            in_process: The workers are threads of one process, which torch can give no groups of their own.
            group: Name of the group.
            slot: The worker's.
            host: Address under which the other slots reach this machine.
            device: The slot's.
        """
        self._worker = worker
        self._in_process = in_process
        self._group, self._slot, self._host, self._device = group, slot, host, device
        self._lock = threading.Lock()
        self._made: dict[str, _Made] = {}
        self._asked: dict[tuple[str | None, str | None], None] = {}  # by role and axis, in order
        self._meshes: dict[tuple[str | None, str], DeviceMesh] = {}
        self._former_meshes: dict[tuple[str | None, str], weakref.ref[DeviceMesh]] = {}
        self._default: _Default | None = None
        self._former: _Default | None = None  # of before the default group was renewed, whose store goes on
        self._doomed = False  # the default group will be dropped as soon as the lane comes to it
        self._joins_after_that = False
        self._making: tuple[int, Future[str | None]] | None = None  # for which call; why it was left, if it was
        self._not_made = False
        self._epoch = self._default_epoch = 0
        self._gone: dict[int, Operations] = {}  # ranks that begin nothing more in this hold, and what they had begun
        self._cut: set[str] = set()
        self._unfinished: set[str] = set()  # being made: nobody can have begun anything on them here
        self._watching: threading.Event | None = None
        self._dropped: list[tuple[weakref.ref[ProcessGroup], str]] = []
        self._left: list[Any] = []  # the backends of these
        self.slots = 1
        self.generation = 0
        self.timeout_s = 1800.0
        self.cuts = 0  # how often one was cut

    def are_of(self, slots: int, generation: int, timeout_s: float) -> None:
        """Know the colocated group, before anything is asked for."""
        self.slots, self.generation, self.timeout_s = slots, generation, timeout_s

    def watch_collectives(self) -> None:
        """Know all groups of this process and what is done on them, whoever makes them. Torch is there."""
        torch_books.record()
        torch_works.record()
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
                self.have_default()
            board = f"{ctx.group}/{self.generation}/{self._epoch}/{name}"
            whole = f"{ctx.group}/{name}"
            plan = Plan(whole, board, slots, index, False, not self._in_process, self._device, self.timeout_s)
            if len(slots) == 1:
                self._made[name] = _Made(plan.make(torch_groups.hash_store()))
            else:
                self._make_together(plan, name)
            found = self._made[name]
        found.asked = self._worker.asking()
        return found.group

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        """A mesh of the role as torch has them; its groups are those of the mesh's axes."""
        from torch import tensor
        from torch.distributed.device_mesh import DeviceMesh

        if self._in_process and ctx.world_size > 1:
            raise _needs_processes(f"ctx.device_mesh() of {ctx.world_size} ranks", ctx)
        which, place = _mesh_of(ctx, name)
        found = self._meshes.get((ctx.role, which))
        if found is None:
            self.have_default()
            prefix = f"{which}." if which else ""
            axes = tuple(place.shape)
            groups = [self.get(ctx, prefix + axis) for axis in axes]
            ranks = [0] if self._in_process else list(ctx.slots)
            # The same object again, as long as anybody has it: to torch's caches of how tensors lie on meshes, another
            # one would be equal to it, so that tensors on the new one would become tensors on the former.
            former = self._former_meshes.pop((ctx.role, which), _nobody)()
            if former is not None and torch_books.point(former, groups):
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
        default = self._default
        assert default is not None
        if default.address is None:  # that of a single slot needs no store
            default.store, default.address = torch_groups.serve_store(self._host)
        return default.address

    # -- the default group

    def have_default(self) -> None:
        """Have the default group made, unless it is there; threads share that of their process."""
        if self._in_process:
            if self._default is None:
                torch_groups.share_default(self)
                self._default = _Default(0)
                self._default.made.set_result(None)
            return
        made = self.join().made
        if not made.done():
            left = self._begin_wait()
            made.add_done_callback(lambda _: self._end_wait(left))
            if (reason := left.result()) is not None:
                raise Consequence(reason)
        made.result()

    def join(self) -> _Default:
        """Have this slot do its part in making the default group, if that isn't under way; from any thread."""
        with self._lock:
            if self._default is not None:
                return self._default
            former, self._former = self._former, None
            default = self._default = _Default(self._default_epoch)
            if former is not None:
                default.address, default.store = former.address, former.store
        if self.slots == 1:
            self._join(default, former)
        else:
            # Not on the lane, which may be in a call that has nothing to do with it, nor where messages are received.
            arguments = default, former
            threading.Thread(target=self._join, args=arguments, name="colocate-default-group", daemon=True).start()
        return default

    def asked_to_join(self) -> None:
        """Another slot makes the default group. It may have dropped the former one before this one has."""
        with self._lock:
            if self._doomed:
                self._joins_after_that = True
                return
        self.join()

    def _join(self, default: _Default, former: _Default | None) -> None:
        name, board = f"{self._group}/default", f"{self._group}/{self.generation}/{default.epoch}/default"
        slots = range(self.slots)
        plan = Plan(name, board, slots, self._slot, True, False, self._device, self.timeout_s)
        try:
            if former is not None:
                former.made.exception()  # it is over
                bury(torch_books.forget(name))
            if torch_groups.has_default():
                raise ConfigError(
                    f"slot {self._slot} of group {self._group!r} is to have a default process group that colocate "
                    "makes, but a role has made torch's default one in this process already: leave "
                    "init_process_group() to colocate, and say .on(default_group=True) for it to be there at once"
                )
            store = torch_groups.hash_store()
            if self.slots > 1:
                store = self._store_for(board, default)
            with self._lock:
                self._unfinished.add(name)
            plan.make(store)
        except BaseException as error:
            with self._lock:
                # Whoever asks next tries again, where the others can't have gone on meanwhile.
                if self._default is default and (self.slots == 1 or isinstance(error, Consequence)):
                    self._default = None
                self._not_made = self._not_made or not isinstance(error, ConfigError | Consequence)
            if self.slots > 1 and not isinstance(error, Consequence):  # the others would wait for this slot
                self._refuse(board, f"slot {self._slot} can't take part in the default group: {message_of(error)}")
            self._unfinished.discard(name)
            default.made.set_exception(error)
        else:
            self._unfinished.discard(name)
            default.made.set_result(None)

    def _store_for(self, board: str, default: _Default) -> Any:
        """What the slots make their default group through, once all of them are about to."""
        if self._slot == 0 and default.address is None:
            default.store, default.address = torch_groups.serve_store(self._host)
        mine = default.address if self._slot == 0 else None
        host, port = self._worker.ask(Meet(board, self.slots, mine, True, None), apart=True)
        default.address = host, port
        return torch_groups.connect_store(default.address, self.timeout_s)

    def _refuse(self, board: str, why: str) -> None:
        try:
            self._worker.ask(Meet(board, self.slots, None, True, why), apart=True)
        except ColocateError:  # that is the answer, if it isn't the end of the worker
            pass

    # -- the others

    def _make_together(self, plan: Plan, name: str) -> None:
        default = self._default
        assert default is not None
        assert default.address is not None
        address = default.address
        self._worker.ask(Meet(plan.board, len(plan.slots), None, False, None))
        left = self._begin_wait()
        with self._lock:
            self._unfinished.add(plan.name)

        def make() -> None:
            try:
                made = plan.make(torch_groups.connect_store(address, self.timeout_s))
            except Exception as error:
                with self._lock:
                    self._unfinished.discard(plan.name)
                    if not left.done():
                        self._not_made = True
                        left.set_exception(error)
                return
            with self._lock:
                self._unfinished.discard(plan.name)
                if not left.done():
                    self._made[name] = _Made(made)
                    del made  # when the lane goes on, nobody but it has the group
                    left.set_result(None)
                    return
            if torch_books.named(plan.name) is made:
                del made
                bury(torch_books.forget(plan.name))

        # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish its half.
        threading.Thread(target=make, name="colocate-process-group", daemon=True).start()
        if (reason := left.result()) is not None:
            raise Consequence(reason)

    def _begin_wait(self) -> Future[str | None]:
        """What ends when the lane needn't wait any longer; with the reason, if what it waits for isn't there."""
        left: Future[str | None] = Future()
        with self._lock:
            self._making = self._worker.asking() or 0, left
        if (reason := self._worker.why_not()) is not None:
            self.end_waits(-1, reason)
        return left

    def _end_wait(self, left: Future[str | None]) -> None:
        with self._lock:
            if not left.done():
                left.set_result(None)

    def end_waits(self, seq: int, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in a call from `seq` on: they may never come."""
        with self._lock:
            if self._making is not None and self._making[0] >= seq and not self._making[1].done():
                self._making[1].set_result(reason)

    def count(self) -> int:
        """How many operations this rank has begun on all groups; a role that changes that shares something."""
        return 0 if self._in_process else torch_books.count()

    # -- after a failure

    def _hopeless(self) -> str | None:
        reason = self._worker.why_not()
        if reason is None:
            return None
        # A group that this call hasn't asked for may have been cut by a call that has nothing to do with it.
        seq, made = self._worker.asking(), dict(self._made)
        names = [name for name, each in made.items() if each.asked == seq] or [*made]
        return reason if torch_books.lost_a_peer(f"{self._group}/{name}" for name in names) else None

    def lost_a_peer(self) -> bool:
        """Whether a peer has left, or died: then this rank's failure is only a consequence.

        All were there to make a group that couldn't be made; or the other end of a connection is gone.
        """
        return self._not_made or bool(self._cut) or torch_books.lost_a_peer(self.operations())

    def operations(self) -> Operations:
        """How many operations this rank has begun on each of its groups, whoever has made them."""
        if self._in_process:  # those of several ranks aren't this worker's
            return {}
        with LOOKING:
            found = torch_books.operations()
        with self._lock:
            return {name: told for name, told in found.items() if name not in self._unfinished}

    def left(self, hold: int, slot: int, operations: Operations) -> None:
        """Another rank begins nothing any more until the hold is over: nobody is to wait for it."""
        with self._lock:
            if hold <= self._epoch:  # this one is back, which the driver hadn't heard
                return
            self._gone[slot] = operations
            over, begins = self._watching, self._watching is None and torch_books.are_any()
            if over is None:
                over = threading.Event()
            if begins:
                self._watching = over
        self._free_those_that_wait()
        if begins:
            # What a call does next isn't seen from here: it may begin to wait at any moment until it is back.
            threading.Thread(target=self._watch, args=(over,), name="colocate-process-groups", daemon=True).start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOKS_AT_GROUPS_EVERY_S):
            self._free_those_that_wait()

    def _free_those_that_wait(self) -> None:
        with LOOKING:  # until it is done: who drops groups, and makes others of the same names, waits for that
            with self._lock:
                gone = dict(self._gone)
            vain = {name for name, (count, _) in torch_books.operations().items() if count > _limit(name, gone)}
            if is_transferring():  # which nobody counts: with whom isn't known either
                vain.update(name for name in torch_books.with_transfers() if gone.keys() & torch_books.members(name))
            self._cut_those(vain - self._cut - self._unfinished)

    def cut(self, names: Iterable[str] | None = None) -> None:
        """Free the peers that wait in a collective of these groups with this rank, and it; by default of all in use."""
        doomed = [*names] if names is not None else [name for name, (count, _) in self.operations().items() if count]
        with LOOKING:
            self._cut_those(doomed)

    def _cut_those(self, names: Collection[str]) -> threading.Thread | None:
        """Do it; what goes on with that, if not all is done."""
        with self._lock:
            self._cut.update(names)
        self.cuts += len(names)
        return torch_books.cut(names)

    def back(self, hold: int) -> tuple[Operations, list[str]]:
        """This rank runs nothing: how many operations it has begun, and which groups it has cut. On the lane."""
        self._not_made, self._making = False, None
        with self._lock:
            self._epoch = hold
            over, self._watching = self._watching, None
            self._gone.clear()
        if over is not None:
            over.set()
        return self.operations(), sorted(self._cut)

    def concerns(self, names: Sequence[str], role: str) -> bool:
        """Whether a role has to do with one of these groups: it is its own, or anybody's."""
        own = f"{self._group}/{role}/"
        return any(name.startswith(own) or not self._is_a_roles(name) for name in names)

    def _is_a_roles(self, name: str) -> bool:
        return name.startswith(f"{self._group}/") and name != f"{self._group}/default"

    def about_to_drop(self, names: Sequence[str]) -> None:
        """The lane will be told to drop these groups; from any thread."""
        with self._lock:
            self._doomed = self._doomed or f"{self._group}/default" in names

    def drop(self, names: Sequence[str]) -> None:
        """Drop these groups, which are of no use any more, so that the next ones are new. On the lane."""
        default = f"{self._group}/default"
        with LOOKING:  # whoever looks for groups to cut has done so, and finds none any more
            pass
        whole = default in names
        if whole:  # with which torch forgets all others
            names = [*torch_books.all_groups()]
        if (rest := torch_books.cut(names)) is not None:  # what still runs on a device ends
            rest.join()
        self._former_meshes.update({key: weakref.ref(mesh) for key, mesh in self._meshes.items()})
        self._meshes.clear()
        for name in names:
            self._made.pop(name.removeprefix(f"{self._group}/"), None)
            if (found := torch_books.reference(name)) is not None:
                self._dropped.append((found, name))
            self._left += torch_books.forget(name)
        with self._lock:
            self._cut.update(names)  # until the roles have gone on without them: who comes after this driver asks again
            if whole:
                self._former, self._default, self._default_epoch = self._default, None, self._epoch
            joins, self._doomed, self._joins_after_that = self._joins_after_that, False, False
        if joins:
            self.join()

    def renewed(self) -> None:
        """The roles go on without those that were dropped."""
        with self._lock:
            self._cut.clear()

    def holders(self) -> list[str]:
        """Which of the dropped groups somebody still holds; none are known as dropped after that. On the lane."""
        dropped, self._dropped = self._dropped, []
        if dropped:
            with LOOKING:  # whoever looked at the lane's frames before has let go of them
                pass
            gc.collect()  # a role's frames may be part of cycles
        # Not before: a model that lets go of a group on the lane would be the last, and wait for what runs in it.
        bury(self._left)
        return sorted({name for group, name in dropped if group() is not None})

    def close(self) -> None:
        """Drop all groups: the worker ends."""
        self._meshes.clear()
        names = [f"{self._group}/{name}" for name in self._made]
        self._made.clear()
        if self._in_process:
            left = [backend for name in names for backend in torch_books.forget(name)]
            if self._default is not None:
                left += torch_groups.unshare_default(self)
        else:
            # Also those that nobody has used: with NCCL the last reference to one that wasn't cut would do it.
            with LOOKING:
                rest = self._cut_those(torch_books.all_groups())
            if rest is not None:
                rest.join(GROUPS_CLOSE_WITHIN_S)
                if rest.is_alive():  # a kernel doesn't end, for which torch would wait, too; the process ends it
                    return
            left = torch_books.forget_all()
        bury(left, GROUPS_CLOSE_WITHIN_S)


def _nobody() -> None:
    """In place of a reference to what there never was."""


def _limit(name: str, gone: Mapping[int, Operations]) -> float:
    """How many operations on a group can be ended, where some ranks begin none any more."""
    slots = torch_books.members(name)
    return min(
        (told[name][0] if name in told else 0 for slot, told in gone.items() if name in told or slot in slots),
        default=math.inf,
    )


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
    """The slots of those that share the group, which of them this rank is, and a name that they agree on."""
    role = ctx.role or ""
    if axis is None:
        return ctx.slots, ctx.rank, f"{role}/*"
    mesh, place, axis = _place(ctx, axis)
    if place is None:
        return [ctx.slot], 0, f"{role}/{axis}/{ctx.rank}"
    if place.size(axis) == ctx.world_size:
        return _members(ctx, None)
    ranks = place.mesh.line(ctx.rank, axis)
    others = [f"{other}={place.rank(other)}" for other in place.shape if other != axis]
    return [ctx.slots[rank] for rank in ranks], place.rank(axis), f"{role}/{mesh}.{axis}/{','.join(others)}"


def _mesh_of(ctx: Context, name: str | None) -> tuple[str, MeshPlace]:
    """A mesh of the role by its name, or its only one."""
    if name is None and len(ctx.meshes) == 1:
        return next(iter(ctx.meshes.items()))
    if name is None or name not in ctx.meshes:
        known = " or ".join(repr(each) for each in ctx.meshes if each) or "none that has a name"
        asked = "" if name is None else repr(name)
        raise ConfigError(
            f"ctx.device_mesh({asked}): role {ctx.role!r} has {known}; say which"
            f"{did_you_mean(name, ctx.meshes) if name else ''}"
        )
    return name, ctx.meshes[name]


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
