"""The context of role code, which is `self.ctx` or `colocate.context()`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import attrs

from colocate import features
from colocate._system.installed import get_pip_line
from colocate._system.nearest import did_you_mean
from colocate._values.mesh import Mesh, get_default_meshes
from colocate.errors import CapabilityError, ColocateError, ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from colocate.features.children.child import Child, Health, Ready

R = TypeVar("R")


@attrs.define(eq=False)
class CallState:
    """The state of one running call."""

    seq: int
    valid_rows: int | None = attrs.field(default=None, kw_only=True)
    cancelled: bool = attrs.field(default=False, kw_only=True)
    # The call's method and the number of earlier calls, including calls before a restored checkpoint.
    place: tuple[str, int] | None = attrs.field(default=None, init=False)


@attrs.define(eq=False)
class RowState(CallState):
    """The state of one row of a running call (`@method(rows=...)`).

    Attributes:
        row: The row's index in the driver's argument.
        call: The running call of the row.
        at_end: Cleanup functions of the row, called last first before the value is sent. Awaitable results are
            awaited.
        raised: The row's error, if the row was cancelled because of it.
        turn: The row's position in the order in which the driver takes rows; None for no order.
    """

    row: int
    call: CallState
    at_end: list[Callable[[], object]] = attrs.field(factory=list, init=False)
    raised: BaseException | None = attrs.field(default=None, init=False)
    generator: torch.Generator | None = attrs.field(default=None, init=False)
    turn: int | None = attrs.field(default=None, init=False)


@attrs.define(eq=False)
class MeshPlace:
    """The place of this rank in one mesh of the role."""

    mesh: Mesh
    _rank: int

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis, in order; the last axis varies fastest."""
        return self.mesh.shape

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 for an axis that the mesh lacks."""
        return self.mesh.size(axis)

    def rank(self, axis: str) -> int:
        """Return this rank's index along an axis; 0 for an axis that the mesh lacks."""
        return self.mesh.coordinate(self._rank, axis)


@attrs.frozen
class Rendezvous:
    """The address of a key-value store through which ranks find each other.

    Attributes:
        host: Address of slot 0's machine, as the other slots reach it.
        port: Port of a listening store, so no other process can take it.
    """

    host: str
    port: int


@attrs.define(eq=False)
class Context:
    """The context of a role on one rank: the role's identity and place, and the services of the worker.

    Attributes:
        rank: Index within the role.
        world_size: Number of slots the role has.
        slot: Index of this worker's slot in its group.
        node: Name of the machine.
        role: Name of the role; None in `group.run`.
        group: Name of the group.
        generation: How often the group has been restarted.
        seed: A number derived from runtime seed, group, role and rank.
        meshes: This rank's place in each named mesh; an unnamed one has the key "".
        slots: Indices of the role's slots, in order of rank; these are also the ranks in torch's default group.
        weights_version: How often the role has got weights by `colocate.sync_weights`; 0 for the constructor's weights.
        calls_before: The number of the last call before the checkpoint from which the role continues.
    """

    rank: int
    world_size: int
    slot: int
    node: str
    role: str | None
    group: str
    generation: int
    seed: int
    meshes: Mapping[str, MeshPlace]
    _seed_of_rows: int = attrs.field(default=0, kw_only=True, repr=False, alias="seed_of_rows")
    hosted: bool = True
    _device: str = attrs.field(default="cpu", alias="device")
    _siblings: Mapping[str, object] = attrs.field(factory=dict, alias="siblings")
    _reach: Callable[..., None] | None = attrs.field(default=None, alias="reach")
    slots: Sequence[int] = (0,)
    weights_version: int = 0
    calls_before: int = 0
    # Returns the worker-side object of a feature; the attribute is None outside any worker.
    _part: Callable[[str], Any] | None = attrs.field(default=None, alias="part")
    _report: Callable[[Context, int, int | None], None] | None = attrs.field(default=None, alias="report")
    # The lanes of background roles by role name, from the worker's `Background`.
    _background: Mapping[str, Any] = attrs.field(factory=dict, alias="background")
    _generator: torch.Generator | None = attrs.field(default=None, init=False)
    # Counts the calls of each method, including calls cancelled before the start.
    _calls: dict[str, int] = attrs.field(factory=dict, init=False)
    _asked_siblings: set[str] = attrs.field(factory=set, init=False)
    _borrowed: tuple[str, ...] = attrs.field(default=(), init=False)
    last_call: CallState = attrs.field(factory=lambda: CallState(0), init=False)

    @property
    def mesh(self) -> MeshPlace:
        """This rank's place in the role's only mesh. For a role with several meshes, use `meshes[name]`."""
        if len(self.meshes) != 1:
            raise ConfigError(
                f"role {self.role!r} has several meshes: use ctx.meshes[...] with one of {[*self.meshes]}"
            )
        return next(iter(self.meshes.values()))

    @property
    def device(self) -> torch.device:
        """The slot's device. Needs torch."""
        return cast("torch.device", need_torch("ctx.device").device(self._device))

    @property
    def generator(self) -> torch.Generator:
        """Random generator of this role and rank, equal on every executor for the same seed. Needs torch.

        A failed call on any rank resets the generator to its state before the call, unless the role has begun
        another call since: a repeated call draws the same numbers.

        A row of a method with `rows=` has a generator of its own, seeded by seed, group, role, method, number of
        earlier calls of the method, and row. The generator is equal on every rank, and independent of other rows.
        After a restart or a restore, a row draws the same numbers again.
        """
        call = running_call.get()
        if isinstance(call, RowState):
            if call.generator is None:
                method, number = call.place or ("", 0)
                seed = derive_seed(self._seed_of_rows, f"{method}\0{number}", None, call.row)
                call.generator = need_torch("ctx.generator").Generator(device=self._device).manual_seed(seed)
            return cast("torch.Generator", call.generator)
        if self._generator is None:
            generator = need_torch("ctx.generator").Generator(device=self._device)
            generator.manual_seed(self.seed)
            self._generator = cast("torch.Generator", generator)
        return self._generator

    @property
    def valid_rows(self) -> int | None:
        """Number of real rows in this call's batch; None when nothing was scattered."""
        return self._call.valid_rows

    @property
    def row(self) -> int | None:
        """Index of this row in the driver's argument, in a method with `rows=`; None in other methods."""
        call = self._call
        return call.row if isinstance(call, RowState) else None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for this call any more. A long method checks this, and returns early."""
        call = self._call
        return call.cancelled or (isinstance(call, RowState) and call.call.cancelled)

    @property
    def pausing(self) -> bool:
        """Whether the background role is paused with `how="keep"`, so that `pause_point` would stop here."""
        lane = self._background.get(self.role or "")
        return lane is not None and bool(lane.is_pausing())

    def pause_point(self) -> bool:
        """Stop here while the role is paused with `group.pause(role, how="keep")`; otherwise do nothing.

        A method of a background role calls this between two steps, on the method's own thread. During the stop, the
        role's `load_weights` may be called, its memory may sleep and wake, and the role may be saved and restored.
        An async method awaits `async_pause_point` instead. The stop also ends when nobody waits for the call any
        more (`cancelled`).

        Returns:
            Whether the role has new weights: `weights_version` has changed.
        """
        before, lane = self.weights_version, self._background.get(self.role or "")
        if lane is not None:
            lane.pause_point(self._call)
        return self.weights_version != before

    async def async_pause_point(self) -> bool:
        """Stop like `pause_point` in an async method. Other calls of the role continue to their own pause points."""
        before, lane = self.weights_version, self._background.get(self.role or "")
        if lane is not None:
            await lane.async_pause_point(self._call)
        return self.weights_version != before

    @contextlib.asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Mark a block of an async method as a pause point, because the block only waits, such as for a tool's answer.

        A pause with `how="keep"` doesn't wait for the block. At the block's end the method stops, like at
        `async_pause_point`.
        """
        lane = self._background.get(self.role or "")
        async with contextlib.nullcontext() if lane is None else lane.resting(self._call):
            yield

    @property
    def _call(self) -> CallState:
        # A thread that role code started has no current call, so the last call counts.
        return running_call.get() or self.last_call

    @property
    def background(self) -> bool:
        """Whether the role is a background role."""
        return self.role in self._background

    @property
    def call_seed(self) -> int:
        """A number derived from seed, group, role, method and the count of the method's calls; different in each call.

        The number is equal on all ranks if each of these calls ran on all ranks. A restart or a restore starts the
        sequence again at the same point. A row has the number of its call, also where ranks have run only some of
        these calls.
        """
        call = self._call
        number = self.calls_before + call.seq
        if call.place is not None:
            method, number = call.place
            return derive_seed(self._seed_of_rows, f"{method}\0{number}", None, -1)
        return derive_seed(self._seed_of_rows, str(number), None, -1)

    def number_call(self, call: CallState, method: str) -> None:
        """Number a call among the calls of the method, unless the call already has a number."""
        if call.place is None:
            number = self._calls.get(method, 0)
            self._calls[method], call.place = number + 1, (method, number)

    @contextlib.contextmanager
    def borrow(self, name: str, cls: type[R] | None = None, *, awake: Sequence[str] | None = None) -> Iterator[R]:
        """Provide another role's instance in this worker for a block, with all or part of that role's memory awake.

        Unlike `sibling`, this isn't remembered: if roles take turns, the other role may be asleep in later calls. A
        background role can borrow a role in its constructor, while no calls run.

        Args:
            name: The role's name in the group.
            cls: The role's class, or one of its bases.
            awake: The kinds of the role's memory that are used, such as ("weights",); None for all. This memory stays
                awake until the call ends.

        Raises:
            ColocateError: The slot has no such role, or the role is of another class, as for `sibling`.
            SleepingError: The used memory of that role sleeps.
            StaleWeightsError: The weights are used, and are stale.
            ChildDied: A child of that role has ended by itself.
        """
        if isinstance(awake, str):
            raise ConfigError(f"ctx.borrow(awake={awake!r}) is a string; write awake=({awake!r},)")
        instance = self._sibling(name, cls, begins=self.role not in self._siblings)
        if self._reach is not None:
            self._reach(self, name) if awake is None else self._reach(self, name, tuple(awake))
        before, self._borrowed = self._borrowed, (*self._borrowed, name)
        try:
            yield instance
        finally:
            self._borrowed = before

    def sibling(self, name: str, cls: type[R] | None = None) -> R:
        """Return another role's instance in this worker.

        Args:
            name: The role's name in the group.
            cls: The role's class, or one of its bases.

        Raises:
            ColocateError: The slot has no such role (yet: roles are constructed in the order of their declaration),
                or the role is of another class.
            SleepingError: Memory of that role sleeps.
            StaleWeightsError: The role's weights are stale.
            ChildDied: A child of that role has ended by itself.
        """
        instance = self._sibling(name, cls)
        if self._reach is not None:
            self._reach(self, name)
            self._asked_siblings.add(name)
        return instance

    def _sibling(self, name: str, cls: type[R] | None, begins: bool = False) -> R:
        if name not in self._siblings:
            raise ColocateError(
                f"role {self.role!r} asked for its sibling {name!r}, but slot {self.slot} of group {self.group!r} has "
                f"{sorted(self._siblings) or 'no other role'} (roles are constructed in the order of their declaration)"
                f"{did_you_mean(name, self._siblings)}"
            )
        if name != self.role and not begins and (apart := {name, self.role} & self._background.keys()):
            raise ColocateError(
                f"role {self.role!r} asked for its sibling {name!r}, but {apart.pop()!r} is a background role of group "
                f"{self.group!r}: the other one may be amid a call. Pass values, or bring weights by "
                "colocate.sync_weights"
            )
        instance = self._siblings[name]
        try:
            is_of = cls is None or isinstance(instance, cls)
        except TypeError:  # The class may be a protocol that isn't runtime-checkable.
            is_of = True
        # A script may have defined a class of the same name again since the instance was created.
        names = {(base.__module__, base.__qualname__) for base in type(instance).__mro__}
        if cls is not None and not is_of and (cls.__module__, cls.__qualname__) not in names:
            raise ColocateError(
                f"role {self.role!r} asked for its sibling {name!r} as a {cls.__qualname__}, but it is a "
                f"{type(instance).__qualname__}"
            )
        return cast("R", instance)

    def start(
        self,
        program: Sequence[str] | Callable[[Connection], object],
        *,
        name: str | None = None,
        ready: Ready | None = None,
        within: float = 60.0,
        health: Health | None = None,
        hung_after: float = 30.0,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        cwd: str | None = None,
        port: int | None = None,
        fails: Literal["call", "group"] | None = "call",
    ) -> Child:
        """Start a child process that belongs to the role, such as a server, an engine or a sandbox.

        The child ends with the role, after the role's `close()`, and with worker, driver or machine; so do all
        processes that the child has started. A child that a row starts (`@method(rows=...)`) ends with that row, and
        fails only that row. The child's output appears with the worker's output. In the words of a command, in `env`,
        `ready` and `health`, `{port}` and `{fd}` are replaced by the child's port and socket.

        Args:
            program: A command, as a list of words; or a function, which runs in a new interpreter with an end of a
                connection as argument (`Child.connection`). The folder of the driver's script is on the path of both.
            name: The name of the child; by default the program's, with a number if a child of this name runs.
            ready: When the child is ready: a URL that answers GET with 200; a line of output, given by a part of the
                line or a pattern; a function of the `Child` that returns whether it is ready. None: once it has begun.
            within: Seconds in which the child has to be ready.
            health: A URL, or a function of the `Child` that is called on a thread of its own, to check the child.
            hung_after: A child that fails the health check for so many seconds (more than 0) is ended by SIGABRT. A
                Python program then prints the stacks of its threads, and the error contains them.
            env: Environment variables in addition to the worker's.
            python: The interpreter that runs the words of a command, or the function, for example of another
                environment. For a function, that needs the same version of colocate, and the function's module.
            cwd: The working folder of the child; None for the worker's.
            port: A port of 127.0.0.1 for the child to listen on; 0 for any free port. A command that contains `{fd}`
                gets a listening socket. For other programs, the port is reserved until the child is ready.
            fails: What fails when the child ends by itself. "call": the role's running call, or the next calls, fail
                with `ChildDied`, until the role stops the child, or starts a child of this name again
                (`@method(revives=True)`). "group": the group fails, as by the death of a worker. None: nothing fails,
                and the role itself checks the child.

        Returns:
            The child, which is ready.

        Raises:
            ChildDied: The child has ended before it was ready, or was ended because it wasn't ready in time.
            ConfigError: The program isn't found, the port is taken, or a child of this name runs.
            SerializationError: The function can't be sent.
            ColocateError: This isn't a worker, or the child can't be started.
        """
        if self._part is None:
            raise ColocateError("ctx.start needs a worker: spawn the role (colocate.spawn), on threads say")
        options = program, name, ready, within, health, hung_after, env, python, cwd, port, fails
        return cast("Child", self._part("children").start_child(self, *options))

    def process_group(self, axis: str | None = None) -> ProcessGroup:
        """Return a torch.distributed group of this role's ranks, or of the ranks along one axis of the mesh.

        Every rank of the role must call this at the same place. The group is part of torch's default group, whose ranks
        are the slots of the colocated group. After a failed call in which ranks have waited for each other in vain, the
        next call returns a new group. So a role asks for the group in each call and doesn't keep it, or has a method
        `renew(self)` that works without the old group (see "Bring your trainer"). Needs torch.

        Args:
            axis: An axis of the role's mesh; None for all ranks. If several meshes have the axis: "train.tp".
        """
        need_torch("ctx.process_group()")
        self._refuse_groups("ctx.process_group()")
        return cast("ProcessGroup", self._groups().get(self, axis))

    def device_mesh(self, mesh: str | None = None) -> DeviceMesh:
        """Return the role's mesh as a torch `DeviceMesh` with named axes, for FSDP2, tensor parallelism or DTensor.

        The mesh uses the groups of `process_group(axis)`, with the same rules. Every rank of the role must call this
        at the same place. Needs torch.

        Args:
            mesh: Name of the mesh, if the role has several.
        """
        need_torch("ctx.device_mesh()")
        self._refuse_groups("ctx.device_mesh()")
        return cast("DeviceMesh", self._groups().mesh(self, mesh))

    def _refuse_groups(self, what: str) -> None:
        if self.role in self._background and self.world_size > 1:
            raise CapabilityError(
                f"{what}: role {self.role!r} of group {self.group!r} is a background role, and has no process groups: "
                "the operations of two threads would have no common order on all ranks. Leave background=True out, or "
                "give each slot a role of its own"
            )

    @property
    def rendezvous(self) -> Rendezvous:
        """The address of a torch `TCPStore` on slot 0, through which the group's slots find each other. Needs torch."""
        need_torch("ctx.rendezvous")
        return Rendezvous(*self._groups().rendezvous())

    def _groups(self) -> Any:
        return (
            features.import_module_of("process_groups.alone")
            if self._part is None
            else self._part("process_groups").groups
        )

    def progress(self, done: int, total: int | None = None) -> None:
        """Report the progress of a long method, for hang reports and the timeline."""
        if self._report is not None:
            self._report(self, done, total)


_current: ContextVar[Context | None] = ContextVar("colocate_context", default=None)
running_call: ContextVar[CallState | None] = ContextVar("colocate_call", default=None)
second_halves: ContextVar[list[Generator[Any, Any, Any]] | None] = ContextVar("colocate_save", default=None)
"""Generators to resume after the running `save` has returned; None outside `save`."""
set_current = _current.set
reset_current = _current.reset
current = _current.get


def context() -> Context:
    """Return the context of the running role code.

    Raises:
        ColocateError: No role code is running on this thread.
    """
    current_context = _current.get()
    if current_context is None:
        raise ColocateError(
            "colocate.context() works inside role code only; in a thread of your own, pass ctx on to it"
        )
    return current_context


def derive_seed(seed: int, group: str, role: str | None, rank: int) -> int:
    """Return a 63-bit number derived from all four arguments, the same on every machine and Python version."""
    text = f"{seed}\0{group}\0{role}\0{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def standalone_context(role: str) -> Context:
    """Return the context of a role object outside any worker: rank 0 of 1, on the CPU."""
    seed = derive_seed(0, "standalone", role, 0)
    place = {"": MeshPlace(get_default_meshes(1)[""], 0)}
    rows = derive_seed(0, "standalone", role, -1)
    return Context(0, 1, 0, "localhost", role, "standalone", 0, seed, place, seed_of_rows=rows, hosted=False)


def need_torch(what: str) -> Any:
    """Return the torch module, or raise an ImportError with the command that installs torch."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{what} needs torch, which isn't installed: {get_pip_line('torch')}") from error


def attach(instance: Any, ctx: Context) -> None:
    """Attach a context to an object, so that threads started by the object can use the context, too."""
    # An object with `__slots__` can't store the context, so only `colocate.context()` works there.
    with contextlib.suppress(AttributeError):
        instance._colocate_ctx = ctx
