"""The driver's side: connections to the keepers of its slots, and to the workers that they have started."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate._protocol import commands
from colocate._protocol.commands import COMMANDS, NEWCOMER, TOKEN_BYTES
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Request, Requests
from colocate._system.deadline import Deadline
from colocate._system.jobs import error_text, report_exception
from colocate._system.limits import (
    KEEPER_CONNECTS_WITHIN_S,
    KEEPER_KILLS_WITHIN_S,
    LANE_ENDS_WITHIN_S,
    LAST_WORDS_S,
    LISTED_WITHIN_S,
)
from colocate._system.threads import Thread
from colocate.errors import ClosedError, ClusterError
from colocate.executor import Boot, Exit, Host, HostEvents, Running
from colocate.keeper.process import AFTER_LANE_S
from colocate.worker.serving.service import first_message

_LOOK_S = 0.05


@attrs.frozen
class Patience:
    """How long a driver waits for keepers, in seconds.

    Attributes:
        dial_s: For one that takes a connection.
        kill_s: For one that confirms a kill; then it is stuck, and the cluster is told (`on_stuck`).
        words_s: For the cluster's words about one whose connection has ended (`KeptSlot.lost`), which come another way.
        cut_s: For a sign of life of its machine; then the connections to that are taken for cut.
    """

    dial_s: float = KEEPER_CONNECTS_WITHIN_S
    kill_s: float = KEEPER_KILLS_WITHIN_S
    words_s: float = LAST_WORDS_S
    cut_s: float = wire.CUT_AFTER_S


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
        self.event_loop = wire.EventLoop(name, on_death=self._hub_ended)
        self.event_loop.start()  # now, when whoever connects is told that no thread is to be had
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
                cluster should end the process that it lives in.
            key: The keeper's, where it has one of its own.
            gone: What is said when it is lost and the cluster says nothing: "Dask worker tcp://10.0.0.7:8786 is gone".
        """
        slot = KeptSlot(self, address, on_stuck, key, gone)
        self.add(slot)
        return slot

    def add(self, slot: KeptSlot) -> None:
        """Have a slot connect, in the background.

        Raises:
            ClusterError: No thread can be started for that.
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

    def bear(self, cut_s: float) -> None:
        """Have connections taken for cut after so long (for `Executor.bear`)."""
        self.patience = attrs.evolve(self.patience, cut_s=cut_s)

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
        self.event_loop.close()

    def soon(self, job: Callable[[], None]) -> bool:
        """Run a job that may block, on a thread of its own; False when all of it is closed.

        Raises:
            ClusterError: No thread can be started.
        """

        def run() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._dialling.discard(thread)

        thread = Thread(target=run, name=f"colocate-{self._name}-dial")
        with self._lock:
            if self._closed:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                raise ClusterError(f"no thread can be started to talk to a slot's keeper: {error}") from error
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
            return self.event_loop.attach(sock, on_message, on_closed)
        except BaseException:
            sock.close()
            raise

    def _hub_ended(self, reason: str) -> None:
        """Note that nothing would be heard of the workers any more; their keepers end them, being left alone."""
        for slot in list(self._slots):
            slot._over(reason, is_final=True)


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
        self._requests: Requests[None, Any] = Requests()  # confirmations and lists

    @property
    def is_lost(self) -> bool:
        """Whether its keeper is gone, and no worker can be started any more."""
        return self._lost is not None or self._gone.is_set()  # the latter before the cluster has told why

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
        except ClusterError:
            del self.hosts[host.token]
            raise
        return host

    def lost(self, words: str | None) -> None:
        """The cluster says that the process of the keeper is gone; its words go into `Exit.detail`. From any thread."""
        self._words = words
        self.keepers.event_loop.later(0.0, partial(self._over, words or self._is_gone))

    def close(self) -> None:
        """Let go: the keeper kills what runs, and goes."""
        self._closed = True
        if self._commands is not None:
            self._commands.close()
        self.keepers._slots.discard(self)

    def confirm(self, command: Callable[[int], Message], within_s: float) -> bool:
        """Tell the keeper something that it confirms; whether it has.

        Args:
            command: Makes it, given the number of the confirmation.
            within_s: How long to wait for that.
        """
        request = self._requests.open([None])
        self.command(command(request.token))
        confirmed = request.wait(within_s) and request.error is None
        self._requests.drop(request)
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
        self.keepers._slots.discard(self)

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
        """The keeper doesn't do what it is told. `then` runs on the event loop's thread, when the cluster knows."""
        self._lost = self._lost or "its keeper was stuck, and was ended"  # before the cluster says so: a restart asks
        self.keepers.soon(partial(self._end_keeper, then))

    def _end_keeper(self, then: Callable[[], None]) -> None:
        # First the cluster, then whoever waits for the workers: that may be who gives the slot back.
        try:
            if not self._closed:  # otherwise it has been let go, and has gone
                self._on_stuck()
        finally:
            self.keepers.event_loop.later(0.0, then)

    # -- from any thread

    def ask(self, deadline: Deadline) -> Request[None, Sequence[Any]] | None:
        """Ask the keeper what it runs; None when there is no keeper to ask."""
        self._connected.wait(deadline.left)
        if self._closed or self._lost is not None:
            return None
        request = self._requests.open([None])
        self.command(commands.List(request.token))
        return request

    def listed(self, asked: Request[None, Sequence[Any]] | None, deadline: Deadline) -> list[Running]:
        """Return what it has answered; if it doesn't, what ought to run there, with that doubt."""
        hosts = [host.boot for host in list(self.hosts.values())]
        node = hosts[0].node if hosts else ""
        if asked is None:
            return []
        try:
            (found,) = asked.result(deadline)
        except ClusterError:  # it is gone, and its workers with it
            return []
        except TimeoutError:
            self._requests.drop(asked)
            doubt = f"its keeper hasn't answered within {LISTED_WITHIN_S:g} s"
            return [Running("worker", boot.worker, node=boot.node, doubt=doubt) for boot in hosts]
        return [attrs.evolve(Running(*each), node=node) for each in found]

    def command(self, command: Message) -> None:
        """Tell the keeper something."""
        if self._commands is not None:
            self._commands.send(command.head())

    # -- on the event loop's thread

    def _received(self, head: Head, body: Any) -> None:
        self._told(read(head))

    def _told(self, message: Message) -> None:
        match message:
            case commands.Confirmed():
                self._requests.answered(message.token, None, None)
            case commands.Fenced():
                self.fenced = True
            case commands.Listed():
                self._requests.answered(message.token, None, message.found)
            case commands.Said():
                if (host := self.hosts.get(message.token)) is not None:
                    host.events.logged(message.line)
            case commands.Inspected():
                if (host := self.hosts.get(message.token)) is not None:
                    host.looks.answered(message.number, None, message.what)
            case commands.Ended():
                if (host := self.hosts.get(message.token)) is not None:
                    host.ended(Exit(message.exitcode, message.signal, message.detail))

    def _disconnected(self, reason: str) -> None:
        self._gone.set()
        self._requests.fail_all(ClusterError(reason))
        if self._closed:
            self._over("its keeper was let go")
        else:
            over = partial(self._over, f"{self._is_gone}: {reason}")
            self.keepers.event_loop.later(self.keepers.patience.words_s, over)

    def _over(self, reason: str, *, is_final: bool = False) -> None:
        """Note that the keeper is gone, and its workers with it; or at once that nothing is heard of them any more."""
        self._lost = self._lost or (reason if is_final else self._words or reason)
        self._requests.fail_all(ClusterError(reason))
        for host in list(self.hosts.values()):
            host.ended(Exit(detail=self._lost), is_final=is_final)


class KeptHost(Host):
    """The driver's end of one worker that a keeper has started."""

    def __init__(
        self, slot: KeptSlot, boot: Boot, events: HostEvents, env: Mapping[str, str], token: bytes | None = None
    ) -> None:
        self.slot = slot
        self.boot = boot
        self.events = events
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self._taken = token is not None
        self._env = dict(env)
        self._lock = threading.Lock()
        self._early: list[wire.Frame] = []  # what was sent before there was a lane
        self._exit: Exit | None = None
        self.looks: Requests[None, str | None] = Requests()
        self._killed = False
        self._over = False

    def send(self, frame: Any) -> None:
        """Send a message."""
        if (lane := self.lane) is None:
            with self._lock:
                if self._over:
                    return
                if (lane := self.lane) is None:
                    frame.hold()
                    self._early.append(frame)
                    return
        lane.send(frame)

    def kill(self, astray: bool = False) -> None:
        """End it now: because it has closed its lane, or without a reason that would be told."""
        if self._killed or self._over:
            return
        self._killed = True
        self.slot.command(commands.Kill(self.token, astray))
        event_loop = self.slot.keepers.event_loop

        def doubt() -> None:
            if not self._over:
                self.slot.stuck(partial(self.ended, Exit(detail="it was killed, which its keeper hasn't confirmed")))

        # This process may have been stopped: what has come meanwhile is taken first.
        event_loop.later(self.slot.keepers.patience.kill_s, lambda: event_loop.later(_LOOK_S, doubt))

    def look(self, then: Callable[[str | None], None]) -> None:
        """Have its keeper say what it does, as its memory shows."""
        asked = self.looks.open([None])
        asked.then(lambda: then(asked.answers.get(None)))
        self.slot.command(commands.Inspect(self.token, asked.token))

    # -- on a dialling thread

    def connect(self) -> None:
        """Have the keeper start it, and open its lane."""
        slot, event_loop = self.slot, self.slot.keepers.event_loop
        try:
            lost = slot.wait_connected()
            if lost is not None or self._killed:
                event_loop.later(0.0, partial(self.ended, Exit(detail=lost)))
                return
            ticket = self.token
            if self._taken:
                ticket = secrets.token_bytes(TOKEN_BYTES)
                slot.command(commands.Adopt(ticket, self.token, self.boot.worker))
            else:
                slot.command(commands.Start(self.token, self._env, self.boot.worker, self.boot.imports))
            # Nothing comes before the boot.
            lane = slot.keepers.dial(slot.address, ticket, self.events.received, self._lane_closed, slot.key)
            with self._lock:
                if self._over:
                    lane.close()
                    return
                lane.send(*first_message(self.boot))
                for frame in self._early:
                    lane.send(frame)
                    frame.close()
                self._early.clear()
                self.lane = lane
            if self._killed:  # meanwhile, perhaps before there was anything to kill
                slot.command(commands.Kill(self.token))
        except BaseException as error:
            if isinstance(error, OSError | ClosedError):
                words = f"its lane could not be opened: {error}"
            else:  # a mistake here: there is a group that waits
                report_exception()
                words = f"the thread that opens its lane was ended by {error_text(error)}"
            event_loop.later(0.0, partial(self.ended, Exit(detail=words)))
            slot.command(commands.Kill(self.token))

    # -- on the event loop's thread

    def ended(self, exit: Exit, *, is_final: bool = False) -> None:
        """Note that it is gone. What it has said before is taken first, unless nothing is heard of it any more."""
        known, self._exit = self._exit, self._exit or exit
        if is_final or (known is None and (self.lane is None or self.lane.finished)):
            self._finish()
        elif known is None:
            self.slot.keepers.event_loop.later(LANE_ENDS_WITHIN_S, self._finish)

    def _lane_closed(self, reason: str) -> None:
        if self._exit is not None:
            self._finish()
        else:  # a worker without its lane is of no use: it leaves by itself, or is made to
            self.slot.keepers.event_loop.later(AFTER_LANE_S, partial(self.kill, astray=True))

    def _finish(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            for frame in self._early:
                frame.close()
            self._early.clear()
        if self.lane is not None and not self.lane.finished:
            self.lane.finish("the worker has ended")
        self.slot.hosts.pop(self.token, None)
        self.looks.fail_all(ClusterError("the worker has ended"))
        assert self._exit is not None
        self.events.exited(self._exit)
