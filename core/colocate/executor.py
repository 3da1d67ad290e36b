"""The interface to a cluster: transport and placement, nothing else. Read this page to write an executor.

Core decides the meaning of calls, ownership and errors. An executor lists its nodes, reserves slots, starts a worker
(`colocate.worker`) in each, carries ordered messages to and from the worker, and reports the worker's exit. A `Host` is
the driver's handle of one worker. `colocate.testing.executors` is the suite that an executor passes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from colocate import wire
from colocate._values.codec import BY_REFERENCE as BY_REFERENCE, BY_VALUE as BY_VALUE, STRICT as STRICT, Codec as Codec


@attrs.frozen
class Node:
    """A machine for workers. `cpus` is None if the executor doesn't count CPUs.

    `labels` and `resources` are for an executor that is `Labelled`.
    """

    name: str
    cpus: float | None = None
    gpus: int = 0
    host_memory_bytes: int | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    resources: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Request:
    """A request for slots, granted together or not at all.

    Attributes:
        slots: Number of slots.
        gpus: Whole GPUs of each slot.
        cpus: CPUs of each slot.
        host_memory_bytes: Memory of each slot, if the executor counts memory; None for any.
        strategy: "pack" (as few nodes as possible), "spread" (as many), "strict_pack" (one node) or "strict_spread"
            (a node for each slot).
        timeout: Seconds to wait for slots that could fit but don't now.
        owner: Name of the pool, for messages.
        env: Environment variables of the workers, as in `Boot.env`, for an executor that starts processes early.
        id: Id of the future reservation, unique among all drivers: the runtime's id, a slash, the pool's name. The
            cluster's own listings should show this id for all objects of the reservation.
        detachable: Whether the pool may be given to the cluster later; only for an executor that is `Detachable`.
        ports: The first and the last TCP port to listen on (`Keeper(ports=...)`); None for any.
        groups: Number of groups that may have a worker on each slot at a time; more than one only for an executor
            with `SharedSlots`. The groups share the slot's resources: no group has a reservation of its own.
        labels: Labels of each slot's node; see `placement.matches` for values. `labels`, `resources` and `together`
            are only for an executor that is `Labelled`.
        resources: Amounts of the node's other resources for each slot, by name.
        together: A label with one value on all nodes of the request; empty for none.
        grow: Whether to wait for new nodes if the present nodes can never fit the request. None: if the cluster
            reports that it grows. True only for an executor that is `Growing`.
        cut_s: Seconds of silence after which connections to a machine count as cut (`Keeper(cut_s=...)`); None for
            the default.
    """

    slots: int
    gpus: int = 0
    cpus: float = 1
    host_memory_bytes: int | None = None
    strategy: str = "pack"
    timeout: float = 60.0
    owner: str = ""
    env: Mapping[str, str] = attrs.field(factory=dict)
    id: str = ""
    detachable: bool = False
    ports: tuple[int, int] | None = None
    groups: int = 1
    labels: Mapping[str, str] = attrs.field(factory=dict)
    resources: Mapping[str, float] = attrs.field(factory=dict)
    together: str = ""
    grow: bool | None = None
    cut_s: float | None = None


@attrs.frozen
class Place:
    """The machine, GPUs and address of one slot.

    Attributes:
        node: Name of the machine.
        devices: Indices of the slot's GPUs, among the executor's GPUs on the machine.
        device: Torch's name for the slot's device inside the worker.
        host: Address under which workers on other machines reach this one; loopback without other machines.
        handle: The executor's own key to the slot.
    """

    node: str
    devices: tuple[int, ...] = ()
    device: str = "cpu"
    host: str = "127.0.0.1"
    handle: Any = None


@attrs.frozen(eq=False)
class Reservation:
    """Slots reserved together, sorted by node and device. `handle` is for the executor's own use."""

    places: tuple[Place, ...]
    handle: Any = None


@attrs.frozen
class Boot:
    """The settings with which a worker starts, before any role is imported. Plain `pickle` can serialize these.

    Attributes:
        worker: Id of the worker, unique in its runtime.
        group: Name of the group.
        slot: Index of the slot in its group.
        node: Name of the machine.
        device: Torch's name for the slot's device in the worker.
        cpus: The worker's part of the slot's CPUs, for torch's thread count; None leaves torch alone.
        env: Environment variables, set before torch or a role is imported.
        secret: The runtime's key, which authenticates worker-to-worker channels.
        path: Entries of the driver's `sys.path`, appended if the worker lacks them.
        host: Address under which other workers reach this one's machine.
        strict: Whether contents of residents are checked for writes.
        generation: How often the group has been restarted.
        imports: Slow imports that the roles need, users' modules excluded: a forked worker has them imported. None
            prevents a fork, because the driver has modules of its own in place of Python's.
        log_levels: The levels set on the driver's loggers, by name, if the driver shows logs.
        ports: The first and the last TCP port to listen on; None for any.
        cut_s: As `Request.cut_s`.
    """

    worker: str
    group: str
    slot: int
    node: str
    device: str = "cpu"
    cpus: float | None = None
    env: Mapping[str, str] = attrs.field(factory=dict)
    secret: bytes = attrs.field(default=b"", repr=False)
    path: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    strict: bool = False
    generation: int = 0
    imports: tuple[str, ...] | None = ()
    log_levels: Mapping[str, int] = attrs.field(factory=dict)
    ports: tuple[int, int] | None = None
    cut_s: float | None = None


@attrs.frozen
class Exit:
    """The cluster's facts about a worker's exit. Unknown attributes are None (never a guess).

    Core adds the last lines of output, from `logged`.
    """

    exitcode: int | None = None
    signal: str | None = None
    detail: str | None = None
    log_tail: str | None = None


@attrs.frozen
class About:
    """Description of an executor for commands and errors, available without importing the executor.

    Attributes:
        capabilities: The names of the executor's capabilities, each with the way to connect ("ray with address=…").
        distributions: Distributions of the cluster, whose versions matter in bug reports ("ray").
        joins: The option that names a cluster to join, which `--address` sets; empty if there is none to join.
        packages: The executor's own packages or modules, whose frames tracebacks only count.
        left_here: Returns leftovers of lost drivers on this machine, without connecting. Imports happen in the call,
            and no cluster is needed.
    """

    capabilities: Mapping[str, str] = attrs.field(factory=dict)
    distributions: tuple[str, ...] = ()
    joins: str = ""
    packages: tuple[str, ...] = ()
    left_here: Callable[[], Sequence[Running]] | None = None


@attrs.frozen
class Running:
    """A cluster's report of a worker, a reservation or another object that belongs to colocate.

    Attributes:
        kind: "worker", "reservation", or the executor's own word for another object ("Ray actor").
        id: Id of the worker (`Boot.worker`) or of the reservation (`Request.id`); for others, any unique id.
        owner: For other objects, id of the reservation or the runtime that owns the object.
        node: Name of the machine, if on one machine.
        pid: The process, if there is one.
        since: Time of the start, in seconds of time.time(), if known.
        detail: More text from the cluster.
        doubt: Why the report is doubtful (nobody answers, a slot is lost); empty for a certain one.
    """

    kind: str
    id: str
    owner: str = ""
    node: str = ""
    pid: int | None = None
    since: float | None = None
    detail: str = ""
    doubt: str = ""


class HostEvents(Protocol):
    """Core's callbacks for one host (a worker). Any thread may call; calls for one host come in order."""

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        """Handle a message from the worker; messages come in the order of sending."""

    def logged(self, line: str) -> None:
        """Handle a line of the worker's output; core shows the line, and keeps the last lines.

        A carriage return at the end marks a line that will be overwritten, as those of progress bars.
        """

    def exited(self, exit: Exit) -> None:
        """Handle the host's exit. Called exactly once, also after `kill`; no message follows."""


class Host(abc.ABC):
    """The driver's handle of one worker.

    Attributes:
        pid: The process id, if the executor knows it first.
        lane: The connection for messages to the worker, once there is one.
        token: The token by which another driver can take the worker over (`Detachable.adopt_worker`).
    """

    pid: int | None = None
    lane: wire.SocketLane | None = None
    token: bytes = b""

    @abc.abstractmethod
    def send(self, frame: Any) -> None:
        """Send a frame (see `Executor.frame`) in order, from any thread, without blocking. Dead hosts drop frames."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the worker now, in any state; `exited` follows. Returns at once; harmless for a dead worker."""

    def inspect(self, then: Callable[[str | None], None]) -> None:
        """Inspect an unresponsive worker from outside, and pass a description of its activity to a callback.

        Args:
            then: Called on any thread, soon, with None if nothing can be seen; perhaps never, for a worker that is
                just ending.
        """
        then(None)


class Executor(abc.ABC):
    """Runs workers on a cluster. Core makes one executor per runtime, with the options given to `connect`.

    The constructor connects and raises errors that a user can act on; a failure leaves nothing behind. The keyword
    parameters (or those of an overridden `connect`) are the options for a config. `name` is the entry point's name,
    for users.

    Core calls the methods on any thread, several at once; on the driver's main thread only `frame`, `numbered`,
    `discard` and `Host.send`, and the others at interpreter exit, when new threads are impossible. No signal handler
    interrupts a method.
    """

    name: ClassVar[str]

    @classmethod
    def connect(cls, **options: Any) -> Executor:
        """Return an executor with the user's options. An executor with several variants picks a variant here."""
        return cls(**options)

    @classmethod  # noqa: B027  # it may do nothing
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Start slow preparations for a connection with these unchecked options; don't wait.

        Core is imported meanwhile. The connection may never happen: nobody undoes these preparations.
        """

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Return why a config by another author must not set an option; None for a harmless option.

        `load_config(..., allow_import=False)` asks. An option does harm if it can run code: by naming an object to
        install, import or load, or a cluster, whose messages are unpickled.
        """
        return f"executor {cls.name!r} doesn't say that this option can't have code run"

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """Return the class of `connect`'s result for these options; configs are checked against this class."""
        return cls

    @abc.abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return all nodes, free or not."""

    @abc.abstractmethod
    def reserve(self, request: Request) -> Reservation:
        """Reserve all slots of a request, or none.

        Raises:
            PlacementError: The request can never fit (at once).
            PlacementTimeout: The request doesn't fit now; nothing stays pending.
            ClusterError: The cluster doesn't answer, or is gone.
            ConfigError: The cluster can't express the request.
        """

    def set_cut_timeout(self, cut_s: float) -> None:  # noqa: B027  # it may do nothing
        """Set the seconds of silence after which connections to a machine count as cut (`Keepers.set_cut_limit`).

        Called first, if the user has given a value. `Request.cut_s` and `Boot.cut_s` have the same value.
        """

    def withdraw(self, request: Request) -> None:  # noqa: B027  # it may do nothing
        """End a running `reserve(request)` soon, by an error or a return, because the user has interrupted it (Ctrl-C).

        Called on another thread, perhaps before `reserve` has begun or after its end.
        """

    @abc.abstractmethod
    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start `colocate.worker` in a slot and return at once; the worker's first message is `hello`.

        Other workers run in the slot only if the executor has `SharedSlots`. Later failures are reported by
        `events.exited`.
        """

    @abc.abstractmethod
    def release(self, reservation: Reservation) -> None:
        """Release slots for new reservations. Called when all hosts there have exited or been killed."""

    def is_lost(self, place: Place) -> bool:
        """Return whether no worker can start in a slot any more, because the node or the cluster's process is gone."""
        return False

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation | None:
        """Reserve replacements for lost slots. Other slots stay reserved meanwhile, and the workers there keep running.

        Args:
            reservation: The result of `reserve`, or of an earlier `replace`.
            lost: The lost slots; all their hosts have exited.
            request: The original request, for as many slots as are lost. It may fit once a new machine has come.

        Returns:
            The new reservation, with replacements at the places of the lost slots. None if unsupported: then all
                slots are released, and reserved again.

        Raises:
            PlacementError: There are no replacements now; nothing has changed.
            ClusterError: The cluster doesn't answer, or is gone.
        """
        return None

    def leaving(self) -> Mapping[str, float | None]:
        """Return nodes that will soon leave the cluster, with deadlines (seconds of `time.time()`, None if unknown).

        Called every few seconds during a run, if overridden.
        """
        return {}

    @abc.abstractmethod
    def running(self) -> Sequence[Running]:
        """Return the objects that the cluster has for this runtime: workers, reservations, and helper objects.

        The audit compares these with the ownership graph, so ask the cluster itself, in bounded time; list an object
        that doesn't answer with its `doubt`.
        """

    def strays(self) -> Sequence[Running]:
        """Return the objects that lost drivers of colocate have left in the cluster."""
        return ()

    @abc.abstractmethod
    def close(self) -> None:
        """Disconnect. Ends only processes that this executor has started itself."""

    codec: Codec = BY_VALUE  # Serializes values; may pass objects unchanged if `in_process`.

    in_process: ClassVar[bool] = False  # True if workers are threads of the driver's process, and share all classes.

    def frame(self, head: tuple[Any, ...], body: Any = None) -> Any:
        """Encode a message for `Host.send`, once for any number of hosts. Later changes of `body` have no effect."""
        return wire.encode(head, body)

    def numbered(self, message: Any, body: Any) -> tuple[Any, Sequence[Callable[[int], object]]]:
        """Encode a message before its calls' numbers are known. Return the frame, and functions that write each number.

        Args:
            message: A message of one or several calls (`message.numbered`), with numbers from `wire.HOLE` on.
            body: The message's body.
        """
        frame = wire.encode_numbered(message.head(), len(message.numbered), body)
        return frame, frame.puts

    def discard(self, frame: Any) -> None:
        """Close a frame after the last send. The frame's memory may be freed once the hosts have received the frame."""
        frame.close()


class OwnProcess:
    """Capability: each worker is a separate process, which has an environment and can be killed."""


class MultiNode:
    """Capability: slots may be on several machines."""


class Labelled:
    """Capability: nodes have labels, and resources other than CPUs, GPUs and memory; requests can name both."""


class Growing:
    """Capability: the cluster is notified of waiting requests, and may add nodes for a request (`Request.grow`)."""


class SharedSlots:
    """Capability: several groups may each run a worker on one slot, with the same devices (`Request.groups`).

    `launch` may be called for a place with running workers. The end of one worker doesn't end another.
    """


@attrs.frozen
class Window:
    """The address at which a job can be inspected (`colocate top`). The key permits inspection, and nothing else.

    Attributes:
        name: The job's name.
        id: Unique in the cluster: the driver's machine, its process, and a number within the process.
        address: Address of the window.
        key: The secret that both sides of a connection prove to know.
    """

    name: str
    id: str
    address: str
    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Reach:
    """The address and encryption by which other processes of the cluster reach a driver.

    Attributes:
        host: Address of the driver's machine for other machines; None without other machines.
        tls: Encryption of connections between machines; None for clear text.
    """

    host: str | None = None
    tls: wire.Tls | None = None


class Watchable(abc.ABC):
    """Capability: other processes can find and inspect a job by name. The cluster has the registry of names."""

    @abc.abstractmethod
    def reach(self) -> Reach:
        """Return this driver's address, and the encryption for connections between machines."""

    @abc.abstractmethod
    def announce(self, window: Window) -> None:
        """Publish a `Window` until this driver retracts the window, or ends for any reason.

        Raises:
            ClusterError: The cluster doesn't confirm it.
        """

    @abc.abstractmethod
    def retract(self, window: Window) -> None:
        """Remove a published `Window`. Harmless if the cluster is gone."""

    @abc.abstractmethod
    def windows(self) -> Sequence[Window]:
        """Return the `Window` objects of all drivers of the cluster."""


@attrs.frozen
class Lease:
    """The terms under which a detached pool lives in the cluster without a driver.

    Attributes:
        name: The pool's name in the cluster.
        ttl: Seconds that the pool lives without a driver.
        workers: The tokens of the pool's workers; other workers end with the driver that started them.
        record: The data from which a driver takes the pool over; empty except for the lead.
        about: Facts for listings.
    """

    name: str
    ttl: float
    workers: frozenset[bytes] = frozenset()
    record: bytes = attrs.field(default=b"", repr=False)
    about: dict[str, Any] = attrs.field(factory=dict)

    @property
    def lead(self) -> bool:
        """Whether this is the lead keeper's lease."""
        return bool(self.record)


@attrs.frozen
class Adopted:
    """A detached pool that this driver commands from now on.

    Attributes:
        reservation: The pool's slots.
        epoch: The driver's number, higher than that of any driver before.
        record: The data that the detaching driver has left for its successors.
    """

    reservation: Reservation
    epoch: int
    record: bytes = attrs.field(repr=False)


class Detachable(abc.ABC):
    """Capability: a pool can outlive the driver that made the pool. Later drivers command the pool, one at a time.

    `DetachableByKeepers` in `colocate.keeper` implements all but two things, which belong to the cluster: a registry
    of names, and freeing a pool's resources when the lead keeper ends by itself.
    """

    @abc.abstractmethod
    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Hand a `detachable` reservation over to the cluster. An error means that nothing has changed.

        Raises:
            ConfigError: Another pool has that name.
            ClusterError: The cluster doesn't confirm.
        """

    @abc.abstractmethod
    def list_pools(self) -> Sequence[Mapping[str, Any]]:
        """Return the detached pools of the cluster, each as described by `colocate.keeper.list_pools`."""

    @abc.abstractmethod
    def inspect_pool(self, name: str) -> Mapping[str, Any]:
        """Return the state of a detached pool, in the form of `colocate.keeper.inspect_pool`. Changes nothing.

        Raises:
            ConfigError: There is no such pool.
            ClusterError: The pool is gone.
        """

    @abc.abstractmethod
    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Take command of a detached pool for this driver.

        Args:
            name: The pool's name.
            who: Description of the new driver.
            own: Whether to take the pool from its present driver; the pool then ends with this driver.
            fenced: Called, on any thread, with a description of another driver that has taken the pool. Must not
                wait.

        Raises:
            ConfigError: There is no such pool.
            BorrowedError: Another driver has the pool.
            ClusterError: The pool is gone.
        """

    @abc.abstractmethod
    def end_pool(self, name: str) -> None:
        """End a detached pool by the cluster's own means, because the pool's keepers don't answer.

        Raises:
            ConfigError: There is no such pool.
            ClusterError: The cluster can't end the pool either.
        """

    @abc.abstractmethod
    def adopt_worker(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """Take over a running worker of an adopted reservation. The first message is `hello`, as after `launch`."""

    @abc.abstractmethod
    def update_lease(self, reservation: Reservation, lease: Lease) -> None:
        """Update a pool's lease after a change of the record or of the pool's workers."""

    @abc.abstractmethod
    def retain(self, reservation: Reservation) -> bool:
        """Take a published reservation back until the next `publish`; return False if another driver has the pool."""

    @abc.abstractmethod
    def detach(self, reservation: Reservation) -> None:
        """Disconnect from a reservation that stays alive: published, adopted without `own`, or taken by another driver.

        After the return, another driver can adopt the reservation.
        """
