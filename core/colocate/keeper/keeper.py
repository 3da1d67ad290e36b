"""The keeper: runs in a process of the cluster, and manages the worker processes of one driver on one slot.

The driver connects to the keeper. The first bytes, a token, tell the purpose of the connection: the driver's commands
(`_protocol.commands`), or the lane of a worker, whose socket is passed on to that worker. When the connection for
commands ends, the driver has released the keeper or is gone, and the workers are killed. A keeper of a pool that may be
detached (`LeaseState`) has one driver after another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

import colocate
from colocate import wire
from colocate._protocol import commands
from colocate._protocol.commands import COMMANDS, NEWCOMER, TOKEN_BYTES
from colocate._protocol.message import Message, decode_head
from colocate._protocol.requests import Requests
from colocate._system.limits import DIALLED_WITHIN_S, LEAD_SLACK_S, LOOKED_AT_WITHIN_S
from colocate._system.threads import Thread
from colocate.errors import ClosedError
from colocate.executor import Lease, Running
from colocate.keeper import forks
from colocate.keeper.process import Launcher, WorkerProcess
from colocate.worker.birth import processes
from colocate.worker.serving.output import Tail
from colocate.worker.serving.service import CUT, HANDOVER_BYTES, LOOK

_ENDS_AGAIN_S = 0.5


@attrs.define(eq=False)
class LeaseState:
    """The lease of a keeper: which driver may command the keeper, and how long the keeper lives without a driver.

    Only keepers of pools that may be detached have a lease. One driver at a time may command, and each driver has a
    higher epoch than the driver before. Before the first detach, the keeper ends with the driver. The lead keeper of a
    pool has the record and decides which driver may command. Other keepers accept any epoch that is higher than their
    own.
    """

    epoch: int = 1  # Epoch of the current driver, or of the last one.
    owned: bool = True  # Whether the pool ends with the driver.
    lease: Lease | None = None  # The lease of the last detach; None before the first detach.
    driver_label: str = ""  # Description of the current driver; empty if there is none.
    since: float = attrs.field(factory=time.time)  # Time of the last change of drivers, in seconds of `time.time()`.
    vacancies: int = 0  # Number of times that the keeper has been without a driver.
    expires_at: float | None = None  # End of the time to live, by `time.monotonic()`; None while a driver commands.

    def get_refusal(self, epoch: int, own: bool) -> tuple[str, str] | None:
        """Return why a new driver is refused, as a kind and a text; None if the driver may command the keeper."""
        if self.lease is None:
            return "closed", "it hasn't been detached"
        if epoch:
            return (
                None
                if epoch > self.epoch
                else ("late", f"{self.driver_label or 'another driver'} has it (epoch {self.epoch})")
            )
        if not self.lease.lead:
            return "closed", "its lead keeper isn't here"
        if self.driver_label and not own:
            return "borrowed", f"{self.driver_label}, since {time.strftime('%F %T', time.localtime(self.since))}"
        return None

    def grant(self, epoch: int, who: str, own: bool) -> None:
        """Record that a new driver commands from now on."""
        self.epoch = epoch or self.epoch + 1
        self.owned, self.driver_label, self.since, self.expires_at = own, who, time.time(), None

    def vacate(self) -> float:
        """Record that no driver commands from now on, and return the time to live in seconds."""
        assert self.lease is not None
        ttl_s = self.lease.ttl if self.lease.lead else self.lease.ttl + LEAD_SLACK_S
        self.vacancies += 1
        self.driver_label, self.since, self.expires_at = "", time.time(), time.monotonic() + ttl_s
        return ttl_s

    def to_listing(self) -> dict[str, Any]:
        """Return the facts about the pool for listings."""
        assert self.lease is not None
        seconds_left = None if self.expires_at is None else max(0.0, self.expires_at - time.monotonic())
        return {
            "name": self.lease.name,
            "answers": True,
            "epoch": self.epoch,
            "driver": self.driver_label or None,
            "owned": self.owned,
            "ttl_s": self.lease.ttl,
            "left_s": seconds_left,
            "since": self.since,
            **self.lease.about,
        }


class Keeper:
    """Starts, watches and ends the workers of one slot, from any process on the slot's machine.

    Args:
        key: The secret that the keeper shares with the driver (`Keepers.key`).
        host: Address of this machine for other machines; None if the driver is on this machine.
        bind: Address to listen on if it isn't `host`: "0.0.0.0" behind address translation.
        ports: The first and the last port of the range to listen on, if other ports are closed; None for any port.
        cut_s: Seconds of silence of the driver's machine after which the connections count as cut
            (`Request.cut_s`); None for the default within a cluster.
        env: Environment variables that workers get in addition to this process's own; None if there will be no workers.
        tls: Certificates for connections with other machines; None leaves the traffic in clear text.
        name: The reservation's id (`Request.id`), shown in process listings of the machine.
        detachable: Whether other drivers may follow the first one, after a detach.
        dialled_within_s: Timeout for the connection of the first driver.
        on_end: Called once, on a thread of its own, when the driver has released the keeper or is gone, and all workers
            have ended.
    """

    def __init__(
        self,
        key: bytes,
        *,
        host: str | None = None,
        bind: str | None = None,
        ports: tuple[int, int] | None = None,
        cut_s: float | None = None,
        env: Mapping[str, str] | None = None,
        tls: wire.Tls | None = None,
        name: str = "",
        detachable: bool = False,
        dialled_within_s: float | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = f"{name}#{secrets.token_hex(4)}"  # One process may have several keepers of the same name.
        # This path makes the workers import the same colocate, however this process was set up.
        path = [os.environ.get("PYTHONPATH"), str(Path(colocate.__file__).parent.parent)]
        self._base = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._env = {**self._base, **(env or {})}
        self._starts = env is not None
        self._tls = tls
        self._on_end = on_end
        self._cut_s = wire.CUT_AFTER_S if cut_s is None else cut_s
        # The ports are opened before any thread starts, so that an error leaves nothing to undo.
        listeners = wire.listen_everywhere(host, tls, bind=bind, ports=ports, what=f"a keeper of {name or 'a pool'}")
        self.event_loop = wire.EventLoop("keeper", on_death=self._on_loop_ended)
        self._launcher = Launcher()
        self._launcher.start()  # The thread starts now, so that the caller gets the error if the start fails.
        self._leased = LeaseState() if detachable else None
        self._driver: wire.SocketLane | None = None
        self._dialled = False
        self._workers: dict[bytes, _StartedWorker] = {}
        # Worker connections that arrived before the driver's command to start the worker.
        self._lanes: dict[bytes, socket.socket] = {}
        self._tickets: dict[bytes, bytes] = {}  # Worker tokens, by ticket (the token of a new lane).
        self._inspections: Requests[bytes, bytes] = Requests()
        # The last output and exit of ended workers of a detached pool, for a driver that adopts the pool later.
        self._departed: dict[bytes, tuple[list[str], tuple[Any, ...]]] = {}
        self._greetings: set[socket.socket] = set()
        # Workers that may still run. Only the launching thread changes this list.
        self._started: list[_StartedWorker] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._closed = threading.Event()
        self.address = ",".join(listener.address for listener in listeners)
        for listener in listeners:
            self.event_loop.listen(listener, key, self._on_connection)
        self.event_loop.call_later(
            dialled_within_s or DIALLED_WITHIN_S, lambda: None if self._dialled else self._start_closing()
        )
        if self._starts:
            forks.hold_template(self._base)

    def close(self) -> None:
        """End the workers and close all connections, and wait for the end. Not for the event loop's thread."""
        with self._lock:
            first, self._is_closing = not self._is_closing, True
        if not first:
            self._closed.wait()
            return
        try:
            self._launcher.run(self._end_processes)
            self._launcher.close()
            if self._starts:
                forks.release_template()
            self.event_loop.close()
            for sock in (*self._lanes.values(), *self._greetings):
                sock.close()
        finally:
            self._closed.set()

    def _end_processes(self) -> None:
        """End all worker processes. Runs on the launching thread, so that no worker starts afterwards."""
        # Killed workers are included, because a process may have started only after the kill.
        for worker in self._started:
            worker.kill()
        for worker in self._started:
            worker.exit_event.wait()

    # -- on the event loop's thread

    def _on_connection(self, sock: socket.socket) -> None:
        """Read the first bytes of a new connection, which are the token."""
        self._greetings.add(sock)
        wire.set_cut_timeout(sock, self._cut_s)
        token = b""

        def read_token() -> None:
            nonlocal token
            try:
                part = sock.recv(TOKEN_BYTES - len(token))
            except BlockingIOError:
                return
            except OSError:
                part = b""
            token += part
            if not part or len(token) == TOKEN_BYTES:
                self.event_loop.unwatch(sock.fileno())
                self._greetings.discard(sock)
                self._on_token(token if part else None, sock)

        with contextlib.suppress(ClosedError):  # The keeper has just been closed, and `close` also closes the socket.
            self.event_loop.watch(sock.fileno(), read_token)
            read_token()  # TLS may have buffered the token already, and the event loop can't see this.

    def _on_token(self, token: bytes | None, sock: socket.socket) -> None:
        if token is None:  # The peer has closed the connection.
            sock.close()
        elif token not in (COMMANDS, NEWCOMER):
            self._lanes[token] = sock
            if (worker := self._workers.get(self._tickets.get(token, token))) is not None:
                self._launcher.call_soon(partial(self._hand_over, worker, token))
        elif self._is_closing or (token == COMMANDS and self._dialled) or (token == NEWCOMER and self._leased is None):
            sock.close()  # Another driver commands this keeper.
        else:
            try:
                caller = self.event_loop.attach(
                    sock,
                    lambda head, body: self._on_message(caller, decode_head(head)),
                    lambda reason: self._on_driver_gone(caller),
                )
            except ClosedError:  # The keeper has just been closed.
                sock.close()
                return
            if token == COMMANDS:
                self._driver, self._dialled = caller, True

    def _on_message(self, by: wire.SocketLane, message: Message) -> None:
        """Handle a message: a command of the current driver, or a question of another driver."""
        if by is self._driver:
            self._on_command(by, message)
        elif (leased := self._leased) is not None:
            match message:
                case commands.Attach():
                    self._on_attach(by, leased, message)
                case commands.InspectPool():
                    by.send(commands.PoolStatus(None if leased.lease is None else leased.to_listing()).head())
                case commands.InspectWorkers():
                    self._inspect_workers(by)

    def _on_command(self, driver: wire.SocketLane, message: Message) -> None:
        leased = self._leased
        match message:
            case commands.Start():
                self._workers[message.token] = started = _StartedWorker(self, message)
                if message.token in self._lanes:
                    self._launcher.call_soon(partial(self._hand_over, started, message.token))
            case commands.Kill():
                # A worker that isn't found has ended by itself.
                if (doomed := self._workers.get(message.token)) is not None:
                    doomed.kill(message.astray)
            case commands.Inspect():
                if (worker := self._workers.get(message.token)) is not None:
                    worker.inspect(message.number)
            case commands.ListProcesses():  # The list is made on the launching thread, so that no start runs meanwhile.
                self._launcher.call_soon(partial(self._report_processes, message.token))
            case commands.Adopt():
                self._on_adopt(message)
            case commands.Detach() if leased is not None:
                leased.lease, leased.owned = message.lease, False
                self._notify_driver(commands.Ack(message.token))
            case commands.Renew() if leased is not None and leased.lease is not None:
                leased.lease = message.lease
            case commands.Retain() if leased is not None:
                leased.lease, leased.owned = None, True
                if message.token is not None:
                    self._notify_driver(commands.Ack(message.token))
            case commands.ExpirePool():
                if leased is not None and leased.lease is not None:
                    leased.owned = False  # After ExpirePool the pool continues, even if the driver was the owner.
                self._on_driver_gone(driver)
                driver.close("it has let go")

    def _inspect_workers(self, by: wire.SocketLane) -> None:
        request = self._inspections.open(self._workers)
        for worker in list(self._workers.values()):
            worker.request_status(request.token)

        def tell() -> None:
            silent = [worker.name for token, worker in self._workers.items() if token in request.owing]
            by.send(commands.WorkerStatus(list(request.answers.values()), silent).head())

        request.add_callback(tell)
        self.event_loop.call_later(LOOKED_AT_WITHIN_S, partial(self._inspections.drop_request, request))

    def _on_status(self, worker: _StartedWorker, number: int, what: bytes) -> None:
        self._inspections.add_answer(number, worker.token, what)

    def _start_closing(self) -> None:
        try:
            Thread(target=self._close_and_report, name="colocate-keeper-end").start()
        except RuntimeError:  # No thread can be started, but the keeper must end.
            self.event_loop.call_later(_ENDS_AGAIN_S, self._start_closing)

    def _on_loop_ended(self, reason: str) -> None:
        for worker in list(self._started):
            worker.reap()
        self._start_closing()

    def _close_and_report(self) -> None:
        self.close()
        self._on_end()

    def _notify_driver(self, message: Message) -> None:
        if self._driver is not None:
            self._driver.send(message.head())

    def _forget_worker(self, worker: _StartedWorker, exit: tuple[Any, ...]) -> None:
        """Remove a worker after the exit. The exit and the last output are stored if a later driver may ask."""
        self._workers.pop(worker.token, None)
        if self._leased is not None and self._leased.lease is not None and worker.token in self._leased.lease.workers:
            self._departed[worker.token] = list(worker.tail), exit
        if (sock := self._lanes.pop(worker.token, None)) is not None:
            sock.close()

    def _close_door_later(self, door: socket.socket) -> None:
        if door.fileno() >= 0:
            self.event_loop.unwatch(door.fileno())
        self._launcher.call_soon(door.close)

    # -- the change of drivers, on the event loop's thread

    def _on_driver_gone(self, driver: wire.SocketLane) -> None:
        """Handle the end of the driver's connection. End all workers, unless the pool is detached."""
        if driver is not self._driver:
            return
        self._driver = None
        leased = self._leased
        if leased is None or leased.lease is None or leased.owned:
            self._start_closing()
            return
        self._cut_driver(leased.lease)
        vacancies = leased.vacancies + 1

        def expire() -> None:
            if self._driver is None and leased.vacancies == vacancies:
                self._start_closing()

        self.event_loop.call_later(leased.vacate(), expire)

    def _cut_driver(self, lease: Lease) -> None:
        """End the lanes of the former driver, and kill all workers that aren't part of the detached pool."""
        for sock in list(self._lanes.values()):  # The loop uses a copy, because the launching thread removes items.
            sock.close()
        self._lanes.clear()
        self._tickets.clear()
        for token, worker in list(self._workers.items()):
            if token in lease.workers:
                self._launcher.call_soon(worker.cut_lane)
            else:
                worker.kill()

    def _on_attach(self, newcomer: wire.SocketLane, leased: LeaseState, asked: commands.Attach) -> None:
        refusal = leased.get_refusal(asked.epoch, asked.is_owner)
        if refusal is not None:
            newcomer.send(commands.LeadRefused(*refusal).head())
            return
        assert leased.lease is not None
        former, self._driver = self._driver, newcomer
        leased.grant(asked.epoch, asked.driver, asked.is_owner)
        if former is not None:
            former.send(commands.LeadLost(f"{asked.driver} (epoch {leased.epoch})").head())
            former.close("another driver has it now")
        self._cut_driver(leased.lease)
        newcomer.send(commands.LeadGranted(leased.epoch, leased.lease.record).head())

    def _on_adopt(self, adopt: commands.Adopt) -> None:
        ticket, token = adopt.ticket, adopt.token
        if (worker := self._workers.get(token)) is not None:
            worker.name = adopt.name
            self._tickets[ticket] = token
            if ticket in self._lanes:
                self._launcher.call_soon(partial(self._hand_over, worker, ticket))
            return
        lines, exit = self._departed.get(token, ([], (None, None, "its keeper knows nothing of it")))
        for line in lines:
            self._notify_driver(commands.OutputLine(token, line))
        self._notify_driver(commands.WorkerExited(token, *exit))
        if (sock := self._lanes.pop(ticket, None)) is not None:
            sock.close()

    # -- on the launching thread

    def _report_processes(self, token: int) -> None:
        """Report all processes that this keeper has started, according to the operating system."""
        workers = {worker.process.pid: worker.name for worker in list(self._workers.values()) if worker.process}
        running = [
            Running(
                "worker", workers.get(child.supervisor_pid) or f"process {child.pid}", pid=child.pid, since=child.since
            )
            for child in processes.list_children()
            if child.supervisor_pid in workers or child.label == self.label
        ]
        running += [
            entry.to_running() for entry in processes.list_leftovers(os.getpid()) if entry.label in ("", self.label)
        ]
        self._notify_driver(commands.ProcessList(token, [attrs.astuple(entry) for entry in running]))

    def _hand_over(self, worker: _StartedWorker, token: bytes) -> None:
        """Pass a lane to the worker, and start the worker first if necessary."""
        lane = self._lanes.pop(token, None)
        if lane is None:  # The worker has been killed meanwhile.
            return
        if self._is_closing:
            lane.close()
            return
        # The epoch 0 means that no other driver can follow this one.
        epoch = self._leased.epoch if self._leased is not None else 0
        first = worker.process is None
        if first:
            self._started = [other for other in self._started if not other.exit_event.is_set()]
            try:
                worker.start_process({**self._env, **worker.env}, self._base)
            except (OSError, ValueError) as error:  # No descriptor is free, or an environment variable is invalid.
                lane.close()
                words = f"it could not be started: {type(error).__name__}: {error}"
                self.event_loop.call_later(0.0, partial(worker.report_exit, None, None, words))
                return
            self._started.append(worker)
        worker.hand_over(lane, epoch, self._tls, token, first=first)


class _StartedWorker:
    """A worker on the keeper's side, from the driver's command to the end of the process.

    The process receives lanes through a socket: one lane, or one for each driver in turn. Only the launching thread
    sends on the socket and closes the socket, because the number of a closed descriptor may be reused at once.
    """

    def __init__(self, keeper: Keeper, asked: commands.Start) -> None:
        self.token = asked.token
        self.name = asked.name
        self.env = asked.env
        self.tail = Tail()
        self.process: WorkerProcess | None = None
        self.exit_event = threading.Event()  # This event is set when the process has ended.
        self._imports = asked.imports
        self._keeper = keeper
        self._is_killed = False
        self._is_end_reported = self._has_lane = False
        self._door: socket.socket

    # -- on the launching thread

    def start_process(self, env: Mapping[str, str], base: Mapping[str, str]) -> None:
        """Start the process, which then waits for a lane.

        Raises:
            OSError: The process can't be started. No process or descriptor is left.
        """
        process = WorkerProcess(self._keeper.event_loop, self)
        self._door, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process.start(env, theirs, base=base, waits=True, label=self._keeper.label, imports=self._imports)
        except BaseException:
            self._door.close()
            raise
        self.process = process
        if (
            self._is_killed
        ):  # The worker was killed during the start, and the killing thread may have missed the process.
            process.kill()

    def hand_over(self, lane: socket.socket, epoch: int, tls: wire.Tls | None, token: bytes, *, first: bool) -> None:
        """Send a lane to the worker, with the token for a new TLS handshake with the driver.

        With an epoch, the worker may receive other lanes later.
        """
        with lane, contextlib.suppress(OSError):  # The worker has just died, and the exit will be reported.
            socket.send_fds(self._door, [b"%d " % epoch + wire.describe_handover(lane, tls, token)], [lane.fileno()])
            self._has_lane = True
        if not epoch:
            self._door.close()
        elif first:
            with contextlib.suppress(ClosedError):  # The keeper has just been closed.
                self._keeper.event_loop.watch(self._door.fileno(), self._on_door_readable)
                if self.exit_event.is_set():  # The exit may have come before the call of `watch`.
                    self._keeper.event_loop.unwatch(self._door.fileno())

    def cut_lane(self) -> None:
        """Notify the worker to drop the lane, because the driver at the other end no longer commands."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # The worker has just died.
                self._door.send(CUT)

    # -- on the event loop's thread

    def kill(self, astray: bool = False) -> None:
        """Kill the worker. With `astray`, the exit report says that the process still ran after closing the lane."""
        self._is_killed = True
        if self.process is None:
            self.report_exit(None, None, None)
        elif astray:
            self.process.end_stray()
        else:
            self.process.kill()

    def reap(self) -> None:
        """Kill the worker and wait for the exit, because the event loop has ended."""
        if self.process is not None:
            self.process.reap()

    def inspect(self, number: int) -> None:
        """Inspect the worker from outside, and send the result to the driver as the answer to a numbered request."""
        if self.process is not None:
            self.process.inspect(
                lambda what: self._keeper._notify_driver(commands.InspectReport(self.token, number, what))
            )

    def request_status(self, number: int) -> None:
        """Request a status report from the worker. The answer arrives in `_on_door_readable`."""
        if self._has_lane:  # Before the first lane, the worker would mistake the request for a lane.
            with contextlib.suppress(OSError):  # The worker has just died, or doesn't read.
                self._door.send(LOOK + b"%d" % number, socket.MSG_DONTWAIT)

    def on_line(self, line: str) -> None:
        self.tail.append(line)
        self._keeper._notify_driver(commands.OutputLine(self.token, line))

    def on_exit(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        self.report_exit(exitcode, signal, detail)
        self.exit_event.set()
        self._keeper._close_door_later(self._door)

    def report_exit(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Report the worker's exit to the driver, only once. The process may never have started."""
        if not self._is_end_reported:
            self._is_end_reported = True
            self._keeper._notify_driver(commands.WorkerExited(self.token, exitcode, signal, detail))
            self._keeper._forget_worker(self, (exitcode, signal, detail))

    def _on_door_readable(self) -> None:
        try:
            answer = self._door.recv(HANDOVER_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:  # The worker has ended without reading all data.
            answer = b""
        if answer:
            number, _, status = answer.partition(b" ")
            self._keeper._on_status(self, int(number), status)
        else:  # The worker has ended.
            self._keeper.event_loop.unwatch(self._door.fileno())
