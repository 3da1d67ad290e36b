"""The driver's side: connections to the keepers of its slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate._protocol import commands
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Request, Requests
from colocate._system.deadline import Deadline
from colocate._system.jobs import report_exception
from colocate._system.limits import LISTED_WITHIN_S
from colocate.errors import ClosedError, EngineError
from colocate.executor import Boot, Exit, Host, HostEvents, Running
from colocate.keeper.greeting import COMMANDS, NEWCOMER
from colocate.keeper.kept_host import KeptHost, Patience


class Keepers:
    """The keepers of an executor's slots, as its driver sees them.

    Attributes:
        key: The secret to give to each `Keeper`.
    """

    def __init__(self, name: str, tls: wire.Tls | None = None, patience: Patience | None = None) -> None:
        """Make none yet.

        Args:
            name: That of the threads.
            tls: This machine's certificates, where connections with others are encrypted.
            patience: How long keepers are waited for; None for what is usual within a cluster.
        """
        self.patience = patience or Patience()
        self.tls = tls
        self.key = wire.new_key()
        self.hub = wire.Hub(name, on_death=self._hub_ended)
        self.hub.start()  # now, when whoever connects is told that no thread is to be had
        self._name = name
        self._dialling: set[threading.Thread] = set()
        self._slots: set[KeptSlot] = set()
        self._lock = threading.Lock()
        self._closed = False

    def slot(
        self,
        address: str,
        *,
        on_stuck: Callable[[], None] = lambda: None,
        key: bytes | None = None,
        gone: str = "its keeper is gone",
    ) -> KeptSlot:
        """Connect to a slot's keeper, in the background.

        Args:
            address: The keeper's.
            on_stuck: Called on a thread of its own when the keeper can't be reached or doesn't confirm a kill: the
                engine should end the process that it lives in.
            key: The keeper's, where it has one of its own.
            gone: What is said when it is lost and the engine says nothing: "Dask worker tcp://10.0.0.7:8786 is gone".
        """
        slot = KeptSlot(self, address, on_stuck, key, gone)
        self.add(slot)
        return slot

    def add(self, slot: KeptSlot) -> None:
        """Have a slot connect, in the background.

        Raises:
            EngineError: No thread can be started for that.
        """
        self.track(slot)
        connects = False
        try:
            connects = self.soon(slot.connect)
        finally:
            if not connects:  # all of it is closed, say: nobody need wait for this one
                slot.close()
                slot._connected.set()

    def track(self, slot: KeptSlot) -> None:
        """Let go of a slot when all of it is closed."""
        self._slots.add(slot)

    def running(self) -> list[Running]:
        """The workers (for `Executor.running`), as the keepers on their machines find them. Takes a bounded time."""
        deadline = Deadline(LISTED_WITHIN_S)
        slots = list(self._slots)
        answers = [(slot, slot.ask(deadline)) for slot in slots]
        return [each for slot, answer in answers for each in slot.listed(answer, deadline)]

    def close(self) -> None:
        """Let go of all keepers, and end the threads."""
        with self._lock:
            self._closed = True
        for slot in list(self._slots):
            slot.close()
        for thread in list(self._dialling):
            thread.join()  # what it dials answers, or is given up
        self.hub.close()

    def soon(self, job: Callable[[], None]) -> bool:
        """Run a job that may block, on a thread of its own; False when all of it is closed.

        Raises:
            EngineError: No thread can be started.
        """

        def run() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._dialling.discard(thread)

        thread = threading.Thread(target=run, name=f"colocate-{self._name}-dial", daemon=True)
        with self._lock:
            if self._closed:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                raise EngineError(f"no thread can be started to talk to a slot's keeper: {error}") from error
            self._dialling.add(thread)
            return True

    def dial(
        self,
        address: str,
        token: bytes,
        on_message: wire.OnMessage,
        on_closed: wire.OnClosed,
        key: bytes | None = None,
    ) -> wire.SocketLane:
        """Open a connection to a keeper.

        Raises:
            OSError: It can't be reached.
            ClosedError: All of it was closed meanwhile.
        """
        sock = wire.connect(address, key or self.key, self.patience.dial_s, self.tls)
        try:
            wire.cut_after(sock, self.patience.cut_s)
            sock.sendall(token)
            if token not in (COMMANDS, NEWCOMER):  # it is handed on to the worker
                sock = wire.anew(sock, token)
            return self.hub.attach(sock, on_message, on_closed)
        except BaseException:
            sock.close()
            raise

    def _hub_ended(self, reason: str) -> None:
        """Nothing of the workers would be heard any more; their keepers end them, whose connections have ended."""
        for slot in list(self._slots):
            slot.hub_ended(reason)

    def forget(self, slot: KeptSlot) -> None:
        """A slot is closed."""
        self._slots.discard(slot)


class KeptSlot:
    """One slot: the connection that carries the commands to its keeper."""

    def __init__(
        self,
        keepers: Keepers,
        address: str,
        on_stuck: Callable[[], None],
        key: bytes | None = None,
        gone: str = "its keeper is gone",
    ) -> None:
        """Use `Keepers.slot`."""
        self.keepers = keepers
        self._is_gone = gone
        self.address = address
        self.key = key
        self.hosts: dict[bytes, KeptHost] = {}
        self.fenced = False  # another driver has its keeper
        self._gone = threading.Event()
        self._on_stuck = on_stuck
        self._commands: wire.SocketLane | None = None
        self._connected = threading.Event()
        self._closed = False
        self._words: str | None = None
        self._lost: str | None = None
        self._confirmations: Requests[None, None] = Requests()
        self._lists: Requests[None, Sequence[Any]] = Requests()

    @property
    def is_lost(self) -> bool:
        """Whether its keeper is gone, and no worker can be started any more."""
        return self._lost is not None

    def launch(self, boot: Boot, events: HostEvents, env: Mapping[str, str] | None = None) -> Host:
        """Start a worker; returns at once.

        Args:
            boot: Who it is.
            events: Who hears of it.
            env: Environment on top of the boot's.
        """
        return self._host(KeptHost(self, boot, events, {**boot.env, **(env or {})}))

    def take(self, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """Take up a worker that runs, or did, by its token; returns at once."""
        return self._host(KeptHost(self, boot, events, {}, token))

    def _host(self, host: KeptHost) -> Host:
        self.hosts[host.token] = host
        try:
            if not self.keepers.soon(host.connect):
                host.ended(Exit(detail="its keeper was let go"))
        except EngineError:
            del self.hosts[host.token]
            raise
        return host

    def lost(self, words: str | None) -> None:
        """The engine says that the process of the keeper is gone; its words go into `Exit.detail`. From any thread."""
        self._words = words
        self.keepers.hub.later(0.0, partial(self._over, words or self._is_gone))

    def close(self) -> None:
        """Let go: the keeper kills what runs, and goes."""
        self._closed = True
        if self._commands is not None:
            self._commands.close()
        self.keepers.forget(self)

    def confirm(self, command: Callable[[int], Message], within_s: float) -> bool:
        """Tell the keeper something that it confirms; whether it has.

        Args:
            command: Makes it, given the number of the confirmation.
            within_s: How long to wait for that.
        """
        request = self._confirmations.open([None])
        self.command(command(request.token))
        confirmed = request.wait(within_s) and request.error is None
        self._confirmations.drop(request)
        return confirmed

    def leave(self) -> None:
        """Begin to let go of a keeper that goes on without this driver: tell it."""
        self._closed = True
        self.command(commands.GiveUp())

    def left(self, deadline: Deadline) -> None:
        """Wait until it knows, and let go."""
        if self._commands is not None:
            self._gone.wait(deadline.left)
            self._commands.close()
        self.keepers.forget(self)

    # -- on a dialling thread

    def connect(self) -> None:
        """Dial the keeper."""
        try:
            if not self._closed:
                self._dial()
        except BaseException as error:  # whatever it is: there is a group that waits
            if not isinstance(error, OSError | ClosedError):
                report_exception()
            self._lost = f"{self._is_gone}: {error}"
            self._end_keeper(partial(self._over, self._lost))
        finally:
            self._connected.set()

    def _dial(self) -> None:
        keepers = self.keepers
        self._commands = keepers.dial(self.address, COMMANDS, self._received, self._disconnected, self.key)
        if self._closed:
            self._commands.close()

    def wait_connected(self) -> str | None:
        """Wait for the keeper; the reason when there is none."""
        self._connected.wait()
        return self._lost if self._commands is not None else self._lost or "its keeper was let go"

    def stuck(self, then: Callable[[], None]) -> None:
        """The keeper doesn't do what it is told. `then` runs on the hub's thread, once the engine has been told."""
        self._lost = self._lost or "its keeper was stuck, and was ended"  # before the engine says so: a restart asks
        self.keepers.soon(partial(self._end_keeper, then))

    def _end_keeper(self, then: Callable[[], None]) -> None:
        # First the engine, then whoever waits for the workers: that may be who gives the slot back.
        try:
            if not self._closed:  # otherwise it has been let go, and has gone
                self._on_stuck()
        finally:
            self.keepers.hub.later(0.0, then)

    # -- from any thread

    def ask(self, deadline: Deadline) -> Request[None, Sequence[Any]] | None:
        """Ask the keeper what it runs; None when there is no keeper to ask."""
        self._connected.wait(deadline.left)
        if self._closed or self._lost is not None:
            return None
        request = self._lists.open([None])
        self.command(commands.List(request.token))
        return request

    def listed(self, asked: Request[None, Sequence[Any]] | None, deadline: Deadline) -> list[Running]:
        """What it has answered; if it doesn't, what ought to run there, with that doubt."""
        hosts = [host.boot for host in list(self.hosts.values())]
        node = hosts[0].node if hosts else ""
        if asked is None:
            return []
        try:
            (found,) = asked.result(deadline)
        except EngineError:  # it is gone, and its workers with it
            return []
        except TimeoutError:
            self._lists.drop(asked)
            doubt = f"its keeper hasn't answered within {LISTED_WITHIN_S:g} s"
            return [Running("worker", boot.worker, node=boot.node, doubt=doubt) for boot in hosts]
        return [attrs.evolve(Running(*each), node=node) for each in found]

    def command(self, command: Message) -> None:
        """Tell the keeper something."""
        if self._commands is not None:
            self._commands.send(command.head())

    # -- on the hub's thread

    def _received(self, head: Head, body: Any) -> None:
        self._told(read(head))

    def _told(self, message: Message) -> None:
        match message:
            case commands.Confirmed():
                self._confirmations.answered(message.token, None, None)
            case commands.Fenced():
                self.fenced = True
            case commands.Listed():
                self._lists.answered(message.token, None, message.found)
            case commands.Said():
                if (host := self.hosts.get(message.token)) is not None:
                    host.events.logged(message.line)
            case commands.Inspected():
                if (host := self.hosts.get(message.token)) is not None:
                    host.seen(message)
            case commands.Ended():
                if (host := self.hosts.get(message.token)) is not None:
                    host.ended(Exit(message.exitcode, message.signal, message.detail))

    def _disconnected(self, reason: str) -> None:
        self._gone.set()
        self._give_up(reason)
        if self._closed:
            self._over("its keeper was let go")
        else:
            over = partial(self._over, f"{self._is_gone}: {reason}")
            self.keepers.hub.later(self.keepers.patience.words_s, over)

    def hub_ended(self, reason: str) -> None:
        """It won't be heard of any more."""
        self._lost = self._lost or reason
        self._give_up(reason)
        for host in list(self.hosts.values()):
            host.lost(reason)

    def _give_up(self, reason: str) -> None:
        error = EngineError(reason)
        self._confirmations.fail_all(error)
        self._lists.fail_all(error)

    def _over(self, reason: str) -> None:
        """The keeper is gone, and its workers with it."""
        self._lost = self._lost or self._words or reason
        self._give_up(reason)
        for host in list(self.hosts.values()):
            host.ended(Exit(detail=self._lost))
