"""The seam to a cluster: transport and placement, nothing else. Read this page to write an executor.

Core decides what a call means, who owns what and what an error is. An executor says what its nodes offer, reserves
slots, starts a *host* (the worker side, `colocate.worker`) in each, carries ordered messages to and from it, and
reports when it is gone. `colocate.testing.executors` is the suite that an executor passes.
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
    """A machine that an executor can place workers on. `cpus` None: not counted.

    `labels` and `resources` are those of an executor that is `Labelled`.
    """

    name: str
    cpus: float | None = None
    gpus: int = 0
    host_memory_bytes: int | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    resources: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Request:
    """Slots wanted together, all or none.

    Attributes:
        slots: How many.
        gpus: Whole GPUs of each.
        cpus: CPUs of each.
        host_memory_bytes: Memory of each, where the executor counts it; None for any.
        strategy: "pack" (as few nodes as possible), "spread" (as many), "strict_pack" (one node) or "strict_spread" (a
            node for each slot).
        timeout: Seconds to wait while they could fit but don't now.
        owner: Name of the pool, for messages.
        env: Environment variables of its workers (`Boot.env` again), for an executor that starts something early.
        id: Of the reservation to be, unique among all drivers: the runtime's id, a slash, the pool's name. Whatever
            the cluster holds for it should carry this, in the cluster's own listings too.
        detachable: Whether the pool may be given to the cluster later; only to an executor that is `Detachable`.
        ports: The first and the last TCP port that may be listened on for it (`Keeper(ports=...)`); None for any.
        groups: How many groups may have a worker on each slot at a time; more than one only to an executor that has
            `SharedSlots`. They share what the slot holds: nothing is reserved for each.
        labels: Labels that each one's node has; see `placement.matches` for what a value may be. These, `resources` and
            `together` come only to an executor that is `Labelled`.
        resources: How much each has of what its node offers besides, by name.
        together: A label of which all of their nodes have one value; empty for none.
        grow: Whether what can never fit into the nodes that there are is waited for all the same, as nodes may come.
            None: if the cluster says by itself that it grows. True only to an executor that is `Growing`.
        cut_s: How long nothing may be heard of a machine until connections with it are taken for cut
            (`Keeper(cut_s=...)`); None for what is usual.
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
    """Where one slot lies.

    Attributes:
        node: Name of the machine.
        devices: Indices of its GPUs, among those that the executor has there.
        device: What torch calls the slot's device inside the worker.
        host: Address under which workers on other machines reach this one; loopback when there are none.
        handle: Whatever the executor needs to find it again.
    """

    node: str
    devices: tuple[int, ...] = ()
    device: str = "cpu"
    host: str = "127.0.0.1"
    handle: Any = None


@attrs.frozen(eq=False)
class Reservation:
    """Slots that are held, sorted by node and device. `handle` is the executor's own."""

    places: tuple[Place, ...]
    handle: Any = None


@attrs.frozen
class Boot:
    """What a host must know before any role is imported; plain data that pickles without colocate's help.

    Attributes:
        worker: Id of the worker, unique in its runtime.
        group: Name of the group.
        slot: Index of the slot in its group.
        node: Name of the machine.
        device: What torch calls the slot's device in the worker.
        cpus: The worker's part of the slot's CPUs, from which torch's thread count is set; None leaves torch alone.
        env: Environment variables, set before torch or a role is imported.
        secret: The runtime's key, which authenticates worker-to-worker channels.
        path: Entries of the driver's `sys.path` that the worker lacks are appended.
        host: Address under which other workers reach this one's machine.
        strict: Whether contents of residents are checked for writes.
        generation: How often the group has been restarted.
        imports: Modules that the roles need, take long to import, and are no user's: a worker that is a fork finds them
            imported. None: it is to be none, for the driver has modules of its own in place of Python's.
        log_levels: The levels that the driver's loggers were given, by name, where it shows logs.
        ports: The first and the last TCP port that it may listen on; None for any.
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
    """How a worker ended, as far as the cluster tells; None where it doesn't (never a guess).

    The last lines of its output are filled in by core, from what was `logged`.
    """

    exitcode: int | None = None
    signal: str | None = None
    detail: str | None = None
    log_tail: str | None = None


@attrs.frozen
class About:
    """What commands and errors say of an executor that nobody has connected to: it is told without being imported.

    Attributes:
        capabilities: The names of its capabilities, each with what to connect to for it ("ray with address=…").
        distributions: Those of the cluster, whose versions matter when something is reported ("ray").
        joins: The option that names a cluster to join, which `--address` gives; empty when there is none to join.
        packages: Packages or modules of the executor's own, whose frames tracebacks only count.
        left_here: Says what drivers that are gone have left on this machine, without connecting. It imports what it
            needs when it is called, and needs no cluster.
    """

    capabilities: Mapping[str, str] = attrs.field(factory=dict)
    distributions: tuple[str, ...] = ()
    joins: str = ""
    packages: tuple[str, ...] = ()
    left_here: Callable[[], Sequence[Running]] | None = None


@attrs.frozen
class Running:
    """Something that a cluster runs or holds under our name, as its far side tells it.

    Attributes:
        kind: "worker", "reservation", or the executor's own word for what else it keeps ("Ray actor").
        id: That of the worker (`Boot.worker`) or of the reservation (`Request.id`); else what tells it apart.
        owner: Id of the reservation, or of the runtime, to which it belongs, for what is neither.
        node: Name of the machine, where it lies on one.
        pid: Its process, where it has one.
        since: When it began, in seconds of time.time(), where that is known.
        detail: What else the cluster tells of it.
        doubt: Why the cluster can't be taken to have it (nobody answers, a slot of it is lost); empty when it does.
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
    """What core wants to hear of one host. Any thread may call; calls for one host come in order."""

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        """A message from the worker, in the order in which it was sent."""

    def logged(self, line: str) -> None:
        """A line of the worker's output; core shows it, and keeps the last ones.

        With a carriage return at its end the line goes on, and will be written over, as those of progress bars.
        """

    def exited(self, exit: Exit) -> None:
        """Hear that the host is gone. Said exactly once, also after `kill`; nothing is received afterwards."""


class Host(abc.ABC):
    """The driver's end of one worker.

    Attributes:
        pid: Its process id, where the executor knows it first.
        lane: The connection by which messages go to the worker, once there is one.
        token: What another driver can take it up by (`Detachable.take`).
    """

    pid: int | None = None
    lane: wire.SocketLane | None = None
    token: bytes = b""

    @abc.abstractmethod
    def send(self, frame: Any) -> None:
        """Send what `Executor.frame` made: ordered, from any thread, never blocking. A dead host swallows it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it now, whatever it does; `exited` follows. Returns at once; harmless when it is gone."""

    def look(self, then: Callable[[str | None], None]) -> None:
        """Have said what it does and where, as it is seen from outside: it doesn't answer by itself.

        Args:
            then: Called on any thread, soon, with None where nothing can be seen; perhaps never, if it is just ending.
        """
        then(None)


class Executor(abc.ABC):
    """Runs workers on a cluster. Core makes one per runtime, with the options given to `connect`.

    The constructor connects and raises what a user can act on; after a failure nothing is left behind. Its keyword
    parameters (or those of `connect`, where that is overridden) are the options that a config may give. `name` is that
    of the entry point, which users write.

    Core calls its methods on any thread, several at once; on the driver's main thread only `frame`, `numbered`,
    `discard` and `Host.send`, and the others at interpreter exit, when no thread can be started any more. No signal's
    handler interrupts any of them.
    """

    name: ClassVar[str]

    @classmethod
    def connect(cls, **options: Any) -> Executor:
        """Make one with the user's options. An executor with several variants picks one here."""
        return cls(**options)

    @classmethod  # noqa: B027  # it may do nothing
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Begin what takes time before it is connected with these options, which nobody has checked; don't wait.

        Core is imported meanwhile. It may not be connected after all: nobody ends what this has begun.
        """

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Why a config that somebody else has written may not give an option; None when the option can do no harm.

        `load_config(..., allow_import=False)` asks. An option does harm when it can have code run: when it names
        something to install, import or load, or a cluster, whose messages are unpickled.
        """
        return f"executor {cls.name!r} doesn't say that this option can't have code run"

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """The class that `connect` would make with these options, which a config is checked against."""
        return cls

    @abc.abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return what there is, whether free or not."""

    @abc.abstractmethod
    def reserve(self, request: Request) -> Reservation:
        """Hold all slots, or none.

        Raises:
            PlacementError: It can never fit (at once).
            PlacementTimeout: It doesn't fit now; nothing stays pending.
            ClusterError: The cluster doesn't answer, or is gone.
            ConfigError: The cluster has no word for what is wanted.
        """

    def bear(self, cut_s: float) -> None:  # noqa: B027  # it may do nothing
        """Take connections for cut after so many seconds in which nothing is heard of a machine (`Keepers.bear`).

        Called before anything else, if the user has said so. `Request.cut_s` and `Boot.cut_s` are the same.
        """

    def withdraw(self, request: Request) -> None:  # noqa: B027  # it may do nothing
        """Have `reserve(request)` end soon, by any error or with a reservation: nobody waits for it any more (Ctrl-C).

        From another thread, perhaps before it has begun or after it has ended.
        """

    @abc.abstractmethod
    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start `colocate.worker` in a slot and return at once; its first message is `hello`.

        Others run there already only where the executor has `SharedSlots`.

        What goes wrong later is said by `events.exited`.
        """

    @abc.abstractmethod
    def release(self, reservation: Reservation) -> None:
        """Give slots back; when it returns they can be reserved again. All their hosts have exited or been killed."""

    def lost(self, place: Place) -> bool:
        """Whether nothing can be launched there any more: its node, or the cluster's process in the slot, is gone."""
        return False

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation | None:
        """Hold others in the place of slots that are lost. The rest stays held meanwhile, and runs what it runs.

        Args:
            reservation: As `reserve` has returned it, or this since.
            lost: Which; all their hosts have exited.
            request: What was asked for, with as many slots as are lost. Perhaps it fits when a machine has come.

        Returns:
            The reservation as it is from now on, with the others where the lost ones were. None where that can't be
            done: then all of it is released, and reserved anew.

        Raises:
            PlacementError: They can't be had now; nothing has changed.
            ClusterError: The cluster doesn't answer, or is gone.
        """
        return None

    def leaving(self) -> Mapping[str, float | None]:
        """Return the nodes that are to go, by name: until when, in seconds of `time.time()`; None: nobody has said.

        It is asked every few seconds while a run goes on, if the executor has this at all.
        """
        return {}

    @abc.abstractmethod
    def running(self) -> Sequence[Running]:
        """Return what the cluster has for this runtime: workers, reservations, and what else it keeps for these.

        The audit compares this with the ownership graph, so ask the far side. Takes a bounded time; what doesn't answer
        is listed with its `doubt`.
        """

    def strays(self) -> Sequence[Running]:
        """Return what the cluster has under colocate's name, from any driver, although that driver is gone."""
        return ()

    @abc.abstractmethod
    def close(self) -> None:
        """Disconnect. Ends what this executor started itself, and nothing else."""

    codec: Codec = BY_VALUE  # how values travel: an executor in the driver's own process may hand them over as they are

    in_process: ClassVar[bool] = False  # whether workers are threads of the driver, which share its classes

    def frame(self, head: tuple[Any, ...], body: Any = None) -> Any:
        """A message for `Host.send`, encoded once for any number of hosts. Later changes to the value don't show."""
        return wire.encode(head, body)

    def numbered(self, message: Any, body: Any) -> tuple[Any, Sequence[Callable[[int], object]]]:
        """A message with calls, encoded as by `frame`, and functions that put the calls' numbers into the frame.

        Args:
            message: Of one or of several calls (`message.numbered`), whose numbers are `wire.HOLE` and those after it.
            body: Its body.
        """
        found = wire.numbered(message.head(), len(message.numbered), body)
        return found, found.puts

    def discard(self, frame: Any) -> None:
        """The frame has been given to all its hosts: what it holds may go once they have it."""
        frame.close()


class OwnProcess:
    """Capability: each worker is a process of its own, which can be killed and has an environment."""


class MultiNode:
    """Capability: slots may lie on several machines."""


class Labelled:
    """Capability: nodes have labels, and resources beyond CPUs, GPUs and memory, by which slots can be placed."""


class Growing:
    """Capability: the cluster may get nodes while slots are waited for, and is told of these (`Request.grow`)."""


class SharedSlots:
    """Capability: several groups may have a worker each on a slot, which sees the slot's devices (`Request.groups`).

    `launch` is called for a place on which others run, and the end of one of these ends no other.
    """


@attrs.frozen
class Window:
    """Where a job of a cluster can be looked at (`colocate top`). Whoever knows the key may look, and do nothing else.

    Attributes:
        name: The job's.
        id: Unique in the cluster: the driver's machine, its process, and which one it is there.
        address: Where to look.
        key: What the sides of a connection prove to know.
    """

    name: str
    id: str
    address: str
    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Reach:
    """How a driver is reached by others of its cluster.

    Attributes:
        host: Address of its machine under which others reach it; None when there are no others.
        tls: What connections between machines are encrypted with; None leaves them in clear text.
    """

    host: str | None = None
    tls: wire.Tls | None = None


class Watchable(abc.ABC):
    """Capability: a job is found by its name by others of its cluster, who look at it. The cluster has the names."""

    @abc.abstractmethod
    def reach(self) -> Reach:
        """How this driver is reached, and what it reaches others with."""

    @abc.abstractmethod
    def announce(self, window: Window) -> None:
        """Have it found, until it is retracted, or this driver is gone in whatever way.

        Raises:
            ClusterError: The cluster doesn't confirm it.
        """

    @abc.abstractmethod
    def retract(self, window: Window) -> None:
        """Have it found no longer. Harmless when the cluster is gone."""

    @abc.abstractmethod
    def windows(self) -> Sequence[Window]:
        """List the windows of all drivers that the cluster has."""


@attrs.frozen
class Lease:
    """The lease on which a pool was given to the cluster.

    Attributes:
        name: What it is called there.
        ttl: Seconds that it lives without a driver.
        workers: The tokens of the workers that belong to it; others end with the driver that started them.
        record: What a driver needs to take it up; empty but for the lead.
        about: What listings show of it.
    """

    name: str
    ttl: float
    workers: frozenset[bytes] = frozenset()
    record: bytes = attrs.field(default=b"", repr=False)
    about: dict[str, Any] = attrs.field(factory=dict)

    @property
    def lead(self) -> bool:
        """Whether it is the lead's."""
        return bool(self.record)


@attrs.frozen
class Adopted:
    """A detached pool that this driver commands from now on.

    Attributes:
        reservation: Its slots.
        epoch: The driver's, higher than that of any before.
        record: What the driver that detached it has left for those after it.
    """

    reservation: Reservation
    epoch: int
    record: bytes = attrs.field(repr=False)


class Detachable(abc.ABC):
    """Capability: a pool can outlive its driver, and be commanded by others after it, one at a time.

    What `colocate.keeper` has for it (`DetachableByKeepers`) does all of this but for two things, which are the
    cluster's: a registry of names, and that what a pool holds is freed when its lead keeper ends by itself.
    """

    @abc.abstractmethod
    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Give a reservation that was made `detachable` to the cluster. Nothing has changed when it raises.

        Raises:
            ConfigError: Another pool has that name.
            ClusterError: The cluster doesn't confirm it.
        """

    @abc.abstractmethod
    def published(self) -> Sequence[Mapping[str, Any]]:
        """The detached pools of the cluster, as `colocate.keeper.listed` describes each."""

    @abc.abstractmethod
    def look(self, name: str) -> Mapping[str, Any]:
        """Return what a detached pool does, as `colocate.keeper.look_inside` describes it, and change nothing of it.

        Raises:
            ConfigError: There is no such pool.
            ClusterError: It is gone.
        """

    @abc.abstractmethod
    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Command a detached pool from now on.

        Args:
            name: Its name.
            who: Who wants it, in words.
            own: Whether it is taken from whoever has it; it then ends with this driver.
            fenced: Told, on any thread and without waiting there, when another driver takes it: who, in words.

        Raises:
            ConfigError: There is no such pool.
            BorrowedError: Another driver has it.
            ClusterError: It is gone.
        """

    @abc.abstractmethod
    def end(self, name: str) -> None:
        """End a detached pool by the cluster's own means: its keepers don't answer.

        Raises:
            ConfigError: There is no such pool.
            ClusterError: The cluster can't either.
        """

    @abc.abstractmethod
    def take(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """Take up a worker that runs in an adopted reservation; its first message is `hello`, as after `launch`."""

    @abc.abstractmethod
    def renew(self, reservation: Reservation, lease: Lease) -> None:
        """The record, or the workers that belong to the pool, have changed."""

    @abc.abstractmethod
    def retain(self, reservation: Reservation) -> bool:
        """Have a reservation to oneself, until it is published again; False when another driver has taken it."""

    @abc.abstractmethod
    def let_go(self, reservation: Reservation) -> None:
        """Let go of a reservation that goes on: it was published, adopted without `own`, or taken by another driver.

        When it returns, another driver can adopt it.
        """
