"""The driver's connections to the keepers of all slots, and to the workers that the keepers have started."""

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
from colocate._protocol.message import Head, Message, decode_head
from colocate._protocol.requests import Request, Requests
from colocate._system.deadline import Deadline
from colocate._system.jobs import format_error, report_exception
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
    """A driver's timeouts for keepers, in seconds.

    Attributes:
        dial_s: The time for a keeper to accept a connection.
        kill_s: The time for a keeper to confirm a kill. A slower keeper is stuck, and `on_stuck` is called.
        words_s: The time for the cluster to report why a keeper's connection has ended (`KeptSlot.on_process_gone`).
        cut_s: The time without a sign of life of the keeper's machine after which the connections count as cut.
    """

    dial_s: float = KEEPER_CONNECTS_WITHIN_S
    kill_s: float = KEEPER_KILLS_WITHIN_S
    words_s: float = LAST_WORDS_S
    cut_s: float = wire.CUT_AFTER_S


class Keepers:
    """The driver's connections to the keepers of an executor's slots.

    Attributes:
        key: The secret that the driver shares with each `Keeper`.
    """

    def __init__(self, name: str, tls: wire.Tls | None = None, patience: Patience | None = None) -> None:
        """Start the event loop, without any connection yet.

        Args:
            name: Name of the threads.
            tls: This machine's certificates, if connections with other machines are encrypted.
            patience: The timeouts for keepers; None for the defaults within a cluster.
        """
        self.patience = patience or Patience()
        self.tls = tls
        self.key = wire.new_key()
        self.event_loop = wire.EventLoop(name, on_death=self._on_loop_ended)
        self.event_loop.start()  # The thread starts now, so that the caller gets the error if the start fails.
        self._name = name
        self._dialling: set[threading.Thread] = set()
        self._slots: set[KeptSlot] = set()
        self._lock = threading.Lock()
        self._closed = False

    def open_slot(
        self,
        address: str,
        *,
        on_stuck: Callable[[], None] = lambda: None,
        key: bytes | None = None,
        gone: str = "its keeper is gone",
    ) -> KeptSlot:
        """Start connecting to a slot's keeper in the background, and return the slot.

        Args:
            address: The keeper's address.
            on_stuck: Called on a thread of its own if the keeper can't be reached or doesn't confirm a kill. It should
                make the cluster end the keeper's process.
            key: The keeper's own secret; None for the secret of all keepers.
            gone: Error text for a lost keeper without a reason from the cluster: "Dask worker tcp://10.0.0.7:8786 is
                gone".
        """
        slot = KeptSlot(self, address, on_stuck, key, gone)
        self.add_slot(slot)
        return slot

    def add_slot(self, slot: KeptSlot) -> None:
        """Start connecting a slot to the slot's keeper, in the background.

        Raises:
            ClusterError: No thread can be started.
        """
        self.track_slot(slot)
        connects = False
        try:
            connects = self.run_on_thread(slot.connect)
        finally:
            # `Keepers` may have been closed meanwhile. Setting `_connected` ends all waits for this slot.
            if not connects:
                slot.close()
                slot._connected.set()

    def track_slot(self, slot: KeptSlot) -> None:
        """Register a slot, so that `close` also closes this slot."""
        self._slots.add(slot)

    def set_cut_limit(self, cut_s: float) -> None:
        """Set the timeout after which connections count as cut, in seconds (for `Executor.set_cut_timeout`)."""
        self.patience = attrs.evolve(self.patience, cut_s=cut_s)

    def running(self) -> list[Running]:
        """List the workers that the keepers find on their machines. Takes bounded time (for `Executor.running`)."""
        deadline = Deadline(LISTED_WITHIN_S)
        slots = list(self._slots)
        answers = [(slot, slot.ask_running(deadline)) for slot in slots]
        return [entry for slot, answer in answers for entry in slot.list_running(answer, deadline)]

    def close(self) -> None:
        """Release all keepers, and end all threads."""
        with self._lock:
            self._closed = True
        for slot in list(self._slots):
            slot.close()
        for thread in list(self._dialling):
            thread.join()  # The thread ends when the keeper answers, or after a timeout.
        self.event_loop.close()

    def run_on_thread(self, job: Callable[[], None]) -> bool:
        """Run a job that may block, on a new thread. Returns False after `close`, without running the job.

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
        """Open a connection to a keeper, and return the connection.

        Raises:
            OSError: The keeper can't be reached.
            ClosedError: The event loop was closed meanwhile.
        """
        sock = wire.connect(address, key or self.key, self.patience.dial_s, self.tls)
        try:
            wire.set_cut_timeout(sock, self.patience.cut_s)
            sock.sendall(token)
            # The keeper passes this connection on to the worker, so TLS starts anew with the worker.
            if token not in (COMMANDS, NEWCOMER):
                sock = wire.restart_tls(sock, token)
            return self.event_loop.attach(sock, on_message, on_closed)
        except BaseException:
            sock.close()
            raise

    def _on_loop_ended(self, reason: str) -> None:
        """End all slots at once, because no message can arrive, and keepers without a driver end their workers."""
        for slot in list(self._slots):
            slot._on_keeper_gone(reason, is_final=True)


class KeptSlot:
    """A slot on the driver's side, with the connection that sends commands to the slot's keeper."""

    def __init__(
        self,
        keepers: Keepers,
        address: str,
        on_stuck: Callable[[], None],
        key: bytes | None = None,
        gone: str = "its keeper is gone",
    ) -> None:
        self.keepers = keepers
        self._gone_text = gone
        self.address = address
        self.key = key
        self.hosts: dict[bytes, KeptHost] = {}
        self.is_fenced = False  # Whether another driver has taken the keeper.
        self._gone_event = threading.Event()
        self._on_stuck = on_stuck
        self._commands: wire.SocketLane | None = None
        self._connected = threading.Event()
        self._closed = False
        self._cluster_words: str | None = None
        self._lost: str | None = None
        self._requests: Requests[None, Any] = Requests()  # Requests that wait for a confirmation or a list.

    @property
    def is_lost(self) -> bool:
        """Whether the keeper is gone, so that no worker can start any more."""
        # `_gone_event` is set even before the cluster has reported the cause.
        return self._lost is not None or self._gone_event.is_set()

    def launch(self, boot: Boot, events: HostEvents, env: Mapping[str, str] | None = None) -> Host:
        """Start a worker, without waiting for the start.

        Args:
            boot: The worker's boot message.
            events: Callbacks for the worker.
            env: Environment variables that override those of `boot`.
        """
        return self._connect_host(KeptHost(self, boot, events, {**boot.env, **(env or {})}))

    def adopt_worker(self, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """Adopt a running or ended worker by the worker's token, without waiting for the keeper."""
        return self._connect_host(KeptHost(self, boot, events, {}, token))

    def _connect_host(self, host: KeptHost) -> Host:
        self.hosts[host.token] = host
        try:
            if not self.keepers.run_on_thread(host.connect):
                host.on_exit(Exit(detail="its keeper was let go"))
        except ClusterError:
            del self.hosts[host.token]
            raise
        return host

    def on_process_gone(self, words: str | None) -> None:
        """Handle the cluster's report that the keeper's process is gone. Any thread may call this.

        `words` is the text for `Exit.detail`.
        """
        self._cluster_words = words
        self.keepers.event_loop.call_later(0.0, partial(self._on_keeper_gone, words or self._gone_text))

    def close(self) -> None:
        """Release the keeper, so that the keeper kills the workers and ends."""
        self._closed = True
        if self._commands is not None:
            self._commands.close()
        self.keepers._slots.discard(self)

    def confirm(self, command: Callable[[int], Message], within_s: float) -> bool:
        """Send a command to the keeper, and return whether a confirmation arrived in time.

        Args:
            command: Returns the message for a given request number, which the confirmation repeats.
            within_s: Timeout in seconds.
        """
        request = self._requests.open([None])
        self.send_command(command(request.token))
        confirmed = request.wait_over(within_s) and request.error is None
        self._requests.drop_request(request)
        return confirmed

    def begin_release(self) -> None:
        """Begin to release a keeper of a detached pool. The pool continues without this driver."""
        self._closed = True
        self.send_command(commands.ExpirePool())

    def finish_release(self, deadline: Deadline) -> None:
        """Wait until the keeper has handled `ExpirePool`, then close the connection."""
        if self._commands is not None:
            self._gone_event.wait(deadline.seconds_left)
            self._commands.close()
        self.keepers._slots.discard(self)

    # -- on a dialling thread

    def connect(self) -> None:
        """Connect to the keeper."""
        try:
            if not self._closed:
                self._dial()
        except BaseException as error:  # Every error must be handled, because a group waits for this slot.
            if not isinstance(error, OSError | ClosedError):
                report_exception()
            self._lost = f"{self._gone_text}: {error}"
            self._end_keeper(partial(self._on_keeper_gone, self._lost))
        finally:
            self._connected.set()

    def _dial(self) -> None:
        keepers = self.keepers
        self._commands = keepers.dial(self.address, COMMANDS, self._on_message, self._on_disconnected, self.key)
        if self._closed:
            self._commands.close()

    def wait_connected(self) -> str | None:
        """Wait until the connection to the keeper is open or has failed; return the reason of a failure, or None."""
        self._connected.wait()
        return self._lost if self._commands is not None else self._lost or "its keeper was let go"

    def end_stuck_keeper(self, then: Callable[[], None]) -> None:
        """Make the cluster end a keeper that ignores commands, then run `then` on the event loop's thread."""
        # `is_lost` must be true before the cluster reports the end, because a restart reads this property.
        self._lost = self._lost or "its keeper was stuck, and was ended"
        self.keepers.run_on_thread(partial(self._end_keeper, then))

    def _end_keeper(self, then: Callable[[], None]) -> None:
        # The cluster ends the keeper before the callback runs, because the callback may return the slot to the cluster.
        try:
            if not self._closed:  # After `close` the keeper ends without the cluster's help.
                self._on_stuck()
        finally:
            self.keepers.event_loop.call_later(0.0, then)

    # -- from any thread

    def ask_running(self, deadline: Deadline) -> Request[None, Sequence[Any]] | None:
        """Request a list of the slot's processes from the keeper; return None if no keeper is connected."""
        self._connected.wait(deadline.seconds_left)
        if self._closed or self._lost is not None:
            return None
        request = self._requests.open([None])
        self.send_command(commands.ListProcesses(request.token))
        return request

    def list_running(self, asked: Request[None, Sequence[Any]] | None, deadline: Deadline) -> list[Running]:
        """Return the keeper's list of workers.

        Without an answer in time, returns the workers that should run there, marked as doubtful.
        """
        hosts = [host.boot for host in list(self.hosts.values())]
        node = hosts[0].node if hosts else ""
        if asked is None:
            return []
        try:
            (entries,) = asked.result(deadline)
        except ClusterError:  # The keeper and the workers are gone.
            return []
        except TimeoutError:
            self._requests.drop_request(asked)
            doubt = f"its keeper hasn't answered within {LISTED_WITHIN_S:g} s"
            return [Running("worker", boot.worker, node=boot.node, doubt=doubt) for boot in hosts]
        return [attrs.evolve(Running(*entry), node=node) for entry in entries]

    def send_command(self, command: Message) -> None:
        """Send a command to the keeper, if connected."""
        if self._commands is not None:
            self._commands.send(command.head())

    # -- on the event loop's thread

    def _on_message(self, head: Head, body: Any) -> None:
        self._handle_message(decode_head(head))

    def _handle_message(self, message: Message) -> None:
        match message:
            case commands.Ack():
                self._requests.add_answer(message.token, None, None)
            case commands.LeadLost():
                self.is_fenced = True
            case commands.ProcessList():
                self._requests.add_answer(message.token, None, message.processes)
            case commands.OutputLine():
                if (host := self.hosts.get(message.token)) is not None:
                    host.events.logged(message.line)
            case commands.InspectReport():
                if (host := self.hosts.get(message.token)) is not None:
                    host.inspections.add_answer(message.number, None, message.text)
            case commands.WorkerExited():
                if (host := self.hosts.get(message.token)) is not None:
                    host.on_exit(Exit(message.exitcode, message.signal, message.detail))

    def _on_disconnected(self, reason: str) -> None:
        self._gone_event.set()
        self._requests.fail_all(ClusterError(reason))
        if self._closed:
            self._on_keeper_gone("its keeper was let go")
        else:
            over = partial(self._on_keeper_gone, f"{self._gone_text}: {reason}")
            self.keepers.event_loop.call_later(self.keepers.patience.words_s, over)

    def _on_keeper_gone(self, reason: str, *, is_final: bool = False) -> None:
        """Record that the keeper and the workers are gone.

        With `is_final`, no message of the workers can arrive any more.
        """
        self._lost = self._lost or (reason if is_final else self._cluster_words or reason)
        self._requests.fail_all(ClusterError(reason))
        for host in list(self.hosts.values()):
            host.on_exit(Exit(detail=self._lost), is_final=is_final)


class KeptHost(Host):
    """The driver's handle of one worker that a keeper has started."""

    def __init__(
        self, slot: KeptSlot, boot: Boot, events: HostEvents, env: Mapping[str, str], token: bytes | None = None
    ) -> None:
        self.slot = slot
        self.boot = boot
        self.events = events
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self._is_adopted = token is not None
        self._env = dict(env)
        self._lock = threading.Lock()
        self._early: list[wire.Frame] = []  # Frames that were sent before the lane was open.
        self._exit: Exit | None = None
        self.inspections: Requests[None, str | None] = Requests()
        self._is_killed = False
        self._is_over = False

    def send(self, frame: Any) -> None:
        """Send a message to the worker. Messages wait until the lane is open."""
        if (lane := self.lane) is None:
            with self._lock:
                if self._is_over:
                    return
                if (lane := self.lane) is None:
                    frame.hold()
                    self._early.append(frame)
                    return
        lane.send(frame)

    def kill(self, astray: bool = False) -> None:
        """Kill the worker. With `astray`, the exit report says that the process still ran after closing the lane."""
        if self._is_killed or self._is_over:
            return
        self._is_killed = True
        self.slot.send_command(commands.Kill(self.token, astray))
        event_loop = self.slot.keepers.event_loop

        def doubt() -> None:
            if not self._is_over:
                self.slot.end_stuck_keeper(
                    partial(self.on_exit, Exit(detail="it was killed, which its keeper hasn't confirmed"))
                )

        # If this process was stopped meanwhile, messages that have arrived are handled before `doubt` runs.
        event_loop.call_later(self.slot.keepers.patience.kill_s, lambda: event_loop.call_later(_LOOK_S, doubt))

    def inspect(self, then: Callable[[str | None], None]) -> None:
        """Request from the keeper an inspection of the worker's process from outside."""
        request = self.inspections.open([None])
        request.add_callback(lambda: then(request.answers.get(None)))
        self.slot.send_command(commands.Inspect(self.token, request.token))

    # -- on a dialling thread

    def connect(self) -> None:
        """Make the keeper start or adopt the worker, and open the worker's lane."""
        slot, event_loop = self.slot, self.slot.keepers.event_loop
        try:
            lost = slot.wait_connected()
            if lost is not None or self._is_killed:
                event_loop.call_later(0.0, partial(self.on_exit, Exit(detail=lost)))
                return
            ticket = self.token
            if self._is_adopted:
                ticket = secrets.token_bytes(TOKEN_BYTES)
                slot.send_command(commands.Adopt(ticket, self.token, self.boot.worker))
            else:
                slot.send_command(commands.Start(self.token, self._env, self.boot.worker, self.boot.imports))
            # The `Boot` must be the first message of a lane.
            lane = slot.keepers.dial(slot.address, ticket, self.events.received, self._on_lane_closed, slot.key)
            with self._lock:
                if self._is_over:
                    lane.close()
                    return
                lane.send(*first_message(self.boot))
                for frame in self._early:
                    lane.send(frame)
                    frame.close()
                self._early.clear()
                self.lane = lane
            if self._is_killed:  # The worker may have been killed before the keeper had a process to kill.
                slot.send_command(commands.Kill(self.token))
        except BaseException as error:
            if isinstance(error, OSError | ClosedError):
                words = f"its lane could not be opened: {error}"
            else:  # Any other error is a bug in colocate, and is reported, because a group waits for this host.
                report_exception()
                words = f"the thread that opens its lane was ended by {format_error(error)}"
            event_loop.call_later(0.0, partial(self.on_exit, Exit(detail=words)))
            slot.send_command(commands.Kill(self.token))

    # -- on the event loop's thread

    def on_exit(self, exit: Exit, *, is_final: bool = False) -> None:
        """Record the worker's exit.

        Earlier messages of the worker are handled first, unless no message can arrive any more.
        """
        former_exit, self._exit = self._exit, self._exit or exit
        if is_final or (former_exit is None and (self.lane is None or self.lane.is_finished)):
            self._finish()
        elif former_exit is None:
            self.slot.keepers.event_loop.call_later(LANE_ENDS_WITHIN_S, self._finish)

    def _on_lane_closed(self, reason: str) -> None:
        if self._exit is not None:
            self._finish()
        else:  # A worker without a lane is useless. After this delay a worker that hasn't exited is killed.
            self.slot.keepers.event_loop.call_later(AFTER_LANE_S, partial(self.kill, astray=True))

    def _finish(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            for frame in self._early:
                frame.close()
            self._early.clear()
        if self.lane is not None and not self.lane.is_finished:
            self.lane.finish("the worker has ended")
        self.slot.hosts.pop(self.token, None)
        self.inspections.fail_all(ClusterError("the worker has ended"))
        assert self._exit is not None
        self.events.exited(self._exit)
