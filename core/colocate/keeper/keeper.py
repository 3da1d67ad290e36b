"""The far side: a keeper in a process of the cluster, and the worker processes of one driver.

The driver dials the keeper, and a token says what the connection is for: the driver's commands (`_protocol.commands`),
or the lane of a worker, which is passed on to that worker as it is. When the commands' connection ends, the driver has
released the keeper or is gone: the workers are killed. A keeper whose pool may be detached (`Leased`) has one driver
after another.
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
from colocate._protocol.message import Message, read
from colocate._protocol.requests import Requests
from colocate._system.limits import DIALLED_WITHIN_S, LEAD_SLACK_S, LOOKED_AT_WITHIN_S
from colocate._system.threads import Thread
from colocate.errors import ClosedError
from colocate.executor import Lease, Running
from colocate.keeper import forks
from colocate.keeper.process import Launcher, WorkerProcess
from colocate.worker.birth import processes
from colocate.worker.serving.output import Tail
from colocate.worker.serving.service import CUT, GIVEN_BYTES, LOOK

_ENDS_AGAIN_S = 0.5


@attrs.define(eq=False)
class Leased:
    """Lease of a keeper: one driver at a time, each by a higher epoch than the one before, or none for a while.

    Only keepers whose pool may be detached have a lease. Before the first detach, the end of the driver is the keeper's
    end. The lead keeper of a pool has the record and decides which driver may command; the others accept an epoch from
    the lead that is higher than theirs.
    """

    epoch: int = 1  # of the current driver, or of the last one
    owned: bool = True  # whether the end of the driver is the end of the pool
    lease: Lease | None = None  # of the last detach; None before the first
    who: str = ""  # the current driver, in words; empty for none
    since: float = attrs.field(factory=time.time)  # start of the current state, in seconds of time.time()
    vacancies: int = 0  # number of times without a driver so far
    ends: float | None = None  # end of the time to live, by time.monotonic(); None while a driver commands

    def refusal(self, epoch: int, own: bool) -> tuple[str, str] | None:
        """Return why a newcomer is refused, as a kind and a text; None if the newcomer may have the keeper."""
        if self.lease is None:
            return "closed", "it hasn't been detached"
        if epoch:
            return (
                None if epoch > self.epoch else ("late", f"{self.who or 'another driver'} has it (epoch {self.epoch})")
            )
        if not self.lease.lead:
            return "closed", "its lead keeper isn't here"
        if self.who and not own:
            return "borrowed", f"{self.who}, since {time.strftime('%F %T', time.localtime(self.since))}"
        return None

    def grant(self, epoch: int, who: str, own: bool) -> None:
        """Record a newcomer as the driver from now on."""
        self.epoch = epoch or self.epoch + 1
        self.owned, self.who, self.since, self.ends = own, who, time.time(), None

    def vacate(self) -> float:
        """Record that no driver commands from now on; return the time to live, in seconds."""
        assert self.lease is not None
        ttl_s = self.lease.ttl if self.lease.lead else self.lease.ttl + LEAD_SLACK_S
        self.vacancies += 1
        self.who, self.since, self.ends = "", time.time(), time.monotonic() + ttl_s
        return ttl_s

    def seen(self) -> dict[str, Any]:
        """Return the facts for listings."""
        assert self.lease is not None
        seconds_left = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        return {
            "name": self.lease.name,
            "answers": True,
            "epoch": self.epoch,
            "driver": self.who or None,
            "owned": self.owned,
            "ttl_s": self.lease.ttl,
            "left_s": seconds_left,
            "since": self.since,
            **self.lease.about,
        }


class Keeper:
    """Starts, watches and ends the workers of one slot, from any process on the slot's machine.

    Args:
        key: The secret that the driver knows (`Keepers.key`).
        host: Address under which other machines reach this one; None when the driver is on this machine.
        bind: Address to listen on if it isn't `host`: "0.0.0.0" behind address translation.
        ports: The first and the last port of the range to listen on, when others are closed; None for any.
        cut_s: Seconds of silence of the driver's machine after which the connections count as cut
            (`Request.cut_s`); None for the default within a cluster.
        env: Environment of the workers on top of this process's own; None when there will be no workers.
        tls: Certificates for connections with other machines; None leaves the traffic in clear text.
        name: The reservation's id (`Request.id`), shown in process listings of the machine.
        detachable: Whether other drivers may follow the first one, after a detach.
        dialled_within_s: Timeout for the connection of the first driver.
        on_end: Called once, on a thread of its own, when the driver has released the keeper or is gone, and everything
            here has been ended.
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
        self.label = f"{name}#{secrets.token_hex(4)}"  # a process may have several keepers of one name
        # The workers then import this very colocate, however this process was set up.
        path = [os.environ.get("PYTHONPATH"), str(Path(colocate.__file__).parent.parent)]
        self._base = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._env = {**self._base, **(env or {})}
        self._starts = env is not None
        self._tls = tls
        self._on_end = on_end
        self._cut_s = wire.CUT_AFTER_S if cut_s is None else cut_s
        # This call comes first: an error leaves nothing to undo.
        listeners = wire.listen_widely(host, tls, bind=bind, ports=ports, what=f"a keeper of {name or 'a pool'}")
        self.event_loop = wire.EventLoop("keeper", on_death=self._hub_ended)
        self._launcher = Launcher()
        self._launcher.start()  # now, so that the caller sees a thread that can't start
        self._leased = Leased() if detachable else None
        self._driver: wire.SocketLane | None = None
        self._dialled = False
        self._workers: dict[bytes, _StartedWorker] = {}
        self._lanes: dict[bytes, socket.socket] = {}  # lanes that came before their worker was requested
        self._tickets: dict[bytes, bytes] = {}  # worker tokens by the tickets of lanes to running workers
        self._looks: Requests[bytes, bytes] = Requests()
        self._departed: dict[
            bytes, tuple[list[str], tuple[Any, ...]]
        ] = {}  # last output and exit of workers that ended under a lease, for a driver that adopts the pool
        self._greetings: set[socket.socket] = set()
        self._started: list[_StartedWorker] = []  # on the launching thread: workers that may still run
        self._lock = threading.Lock()
        self._over = False
        self._closed = threading.Event()
        self.address = ",".join(listener.address for listener in listeners)
        for listener in listeners:
            self.event_loop.listen(listener, key, self._greet)
        self.event_loop.later(dialled_within_s or DIALLED_WITHIN_S, lambda: None if self._dialled else self._let_go())
        if self._starts:
            forks.hold(self._base)

    def close(self) -> None:
        """End the workers and close everything, and wait for that. From any thread but the event loop's."""
        with self._lock:
            first, self._over = not self._over, True
        if not first:
            self._closed.wait()
            return
        try:
            self._launcher.run(self._end)
            self._launcher.close()
            if self._starts:
                forks.let_go()
            self.event_loop.close()
            for sock in (*self._lanes.values(), *self._greetings):
                sock.close()
        finally:
            self._closed.set()

    def _end(self) -> None:
        """End all processes. On the launching thread, so that nothing is started afterwards."""
        for worker in self._started:  # including killed workers whose process came later
            worker.kill()
        for worker in self._started:
            worker.gone.wait()

    # -- on the event loop's thread

    def _greet(self, sock: socket.socket) -> None:
        """Read a new connection's first bytes, the token."""
        self._greetings.add(sock)
        wire.cut_after(sock, self._cut_s)
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
                self._connected(token if part else None, sock)

        with contextlib.suppress(ClosedError):  # just closed; `close` closes the socket
            self.event_loop.watch(sock.fileno(), read_token)
            read_token()  # TLS may have buffered the token already, unseen by the kernel

    def _connected(self, token: bytes | None, sock: socket.socket) -> None:
        if token is None:  # the peer has closed the connection
            sock.close()
        elif token not in (COMMANDS, NEWCOMER):
            self._lanes[token] = sock
            if (worker := self._workers.get(self._tickets.get(token, token))) is not None:
                self._launcher.soon(partial(self._hand_over, worker, token))
        elif self._over or (token == COMMANDS and self._dialled) or (token == NEWCOMER and self._leased is None):
            sock.close()  # another driver commands this keeper
        else:
            try:
                caller = self.event_loop.attach(
                    sock, lambda head, body: self._told(caller, read(head)), lambda reason: self._left(caller)
                )
            except ClosedError:  # just closed
                sock.close()
                return
            if token == COMMANDS:
                self._driver, self._dialled = caller, True

    def _told(self, by: wire.SocketLane, message: Message) -> None:
        """Handle the driver's commands, and the questions of other drivers."""
        if by is self._driver:
            self._commanded(by, message)
        elif (leased := self._leased) is not None:
            match message:
                case commands.Attach():
                    self._attach(by, leased, message)
                case commands.Look():
                    by.send(commands.Seen(None if leased.lease is None else leased.seen()).head())
                case commands.LookInside():
                    self._look_inside(by)

    def _commanded(self, driver: wire.SocketLane, message: Message) -> None:
        leased = self._leased
        match message:
            case commands.Start():
                self._workers[message.token] = started = _StartedWorker(self, message)
                if message.token in self._lanes:
                    self._launcher.soon(partial(self._hand_over, started, message.token))
            case commands.Kill():
                if (doomed := self._workers.get(message.token)) is not None:  # otherwise the worker has ended by itself
                    doomed.kill(message.astray)
            case commands.Inspect():
                if (worker := self._workers.get(message.token)) is not None:
                    worker.look(message.number)
            case commands.List():  # on the launching thread, so that no start runs meanwhile
                self._launcher.soon(partial(self._list, message.token))
            case commands.Adopt():
                self._adopt(message)
            case commands.Detach() if leased is not None:
                leased.lease, leased.owned = message.lease, False
                self._tell(commands.Confirmed(message.token))
            case commands.Renew() if leased is not None and leased.lease is not None:
                leased.lease = message.lease
            case commands.Retain() if leased is not None:
                leased.lease, leased.owned = None, True
                if message.token is not None:
                    self._tell(commands.Confirmed(message.token))
            case commands.GiveUp():
                if leased is not None and leased.lease is not None:
                    leased.owned = False  # a driver that gives up leaves the pool alive, even as the owner
                self._left(driver)
                driver.close("it has let go")

    def _look_inside(self, by: wire.SocketLane) -> None:
        request = self._looks.open(self._workers)
        for worker in list(self._workers.values()):
            worker.look_inside(request.token)

        def tell() -> None:
            silent = [worker.name for token, worker in self._workers.items() if token in request.owing]
            by.send(commands.SeenInside(list(request.answers.values()), silent).head())

        request.then(tell)
        self.event_loop.later(LOOKED_AT_WITHIN_S, partial(self._looks.drop, request))

    def _seen(self, worker: _StartedWorker, number: int, what: bytes) -> None:
        self._looks.answered(number, worker.token, what)

    def _let_go(self) -> None:
        try:
            Thread(target=self._leave, name="colocate-keeper-end").start()
        except RuntimeError:  # no thread can start, and the keeper must end
            self.event_loop.later(_ENDS_AGAIN_S, self._let_go)

    def _hub_ended(self, reason: str) -> None:
        for worker in list(self._started):
            worker.reap()
        self._let_go()

    def _leave(self) -> None:
        self.close()
        self._on_end()

    def _tell(self, message: Message) -> None:
        if self._driver is not None:
            self._driver.send(message.head())

    def _forget(self, worker: _StartedWorker, exit: tuple[Any, ...]) -> None:
        """Forget a worker after the exit, but store the exit and the last output if a later driver may ask."""
        self._workers.pop(worker.token, None)
        if self._leased is not None and self._leased.lease is not None and worker.token in self._leased.lease.workers:
            self._departed[worker.token] = list(worker.tail), exit
        if (sock := self._lanes.pop(worker.token, None)) is not None:
            sock.close()

    def _close_later(self, door: socket.socket) -> None:
        """Close a worker's socket on the launching thread, which also sends there."""
        if door.fileno() >= 0:
            self.event_loop.unwatch(door.fileno())
        self._launcher.soon(door.close)

    # -- the change of drivers, on the event loop's thread

    def _left(self, driver: wire.SocketLane) -> None:
        """Handle the end of the driver's connection: end everything, or only what isn't detached."""
        if driver is not self._driver:
            return
        self._driver = None
        leased = self._leased
        if leased is None or leased.lease is None or leased.owned:
            self._let_go()
            return
        self._cut(leased.lease)
        vacancies = leased.vacancies + 1

        def expire() -> None:
            if self._driver is None and leased.vacancies == vacancies:
                self._let_go()

        self.event_loop.later(leased.vacate(), expire)

    def _cut(self, lease: Lease) -> None:
        """End the former driver's lanes and workers, except for the detached workers."""
        for sock in list(self._lanes.values()):  # a copy: the launching thread pops items
            sock.close()
        self._lanes.clear()
        self._tickets.clear()
        for token, worker in list(self._workers.items()):
            if token in lease.workers:
                self._launcher.soon(worker.cut)
            else:
                worker.kill()

    def _attach(self, newcomer: wire.SocketLane, leased: Leased, asked: commands.Attach) -> None:
        refusal = leased.refusal(asked.epoch, asked.own)
        if refusal is not None:
            newcomer.send(commands.Refused(*refusal).head())
            return
        assert leased.lease is not None
        former, self._driver = self._driver, newcomer
        leased.grant(asked.epoch, asked.who, asked.own)
        if former is not None:
            former.send(commands.Fenced(f"{asked.who} (epoch {leased.epoch})").head())
            former.close("another driver has it now")
        self._cut(leased.lease)
        newcomer.send(commands.Granted(leased.epoch, leased.lease.record).head())

    def _adopt(self, adopt: commands.Adopt) -> None:
        ticket, token = adopt.ticket, adopt.token
        if (worker := self._workers.get(token)) is not None:
            worker.name = adopt.name
            self._tickets[ticket] = token
            if ticket in self._lanes:
                self._launcher.soon(partial(self._hand_over, worker, ticket))
            return
        lines, exit = self._departed.get(token, ([], (None, None, "its keeper knows nothing of it")))
        for line in lines:
            self._tell(commands.Said(token, line))
        self._tell(commands.Ended(token, *exit))
        if (sock := self._lanes.pop(ticket, None)) is not None:
            sock.close()

    # -- on the launching thread

    def _list(self, token: int) -> None:
        """Report the processes started here as the operating system shows them, known to the driver or not."""
        workers = {worker.process.pid: worker.name for worker in list(self._workers.values()) if worker.process}
        running = [
            Running("worker", workers.get(child.started) or f"process {child.pid}", pid=child.pid, since=child.since)
            for child in processes.below_this()
            if child.started in workers or child.label == self.label
        ]
        running += [entry.running() for entry in processes.left_by(os.getpid()) if entry.label in ("", self.label)]
        self._tell(commands.Listed(token, [attrs.astuple(entry) for entry in running]))

    def _hand_over(self, worker: _StartedWorker, token: bytes) -> None:
        """Pass a lane to the worker, and start the worker first if needed."""
        lane = self._lanes.pop(token, None)
        if lane is None:  # the worker has been killed meanwhile
            return
        if self._over:
            lane.close()
            return
        epoch = self._leased.epoch if self._leased is not None else 0  # 0: no other driver can follow this one
        first = worker.process is None
        if first:
            self._started = [other for other in self._started if not other.gone.is_set()]
            try:
                worker.start({**self._env, **worker.env}, self._base)
            except (OSError, ValueError) as error:  # no descriptor is left, or a variable is invalid
                lane.close()
                words = f"it could not be started: {type(error).__name__}: {error}"
                self.event_loop.later(0.0, partial(worker.tell_end, None, None, words))
                return
            self._started.append(worker)
        worker.hand_over(lane, epoch, self._tls, token, first=first)


class _StartedWorker:
    """A worker from the driver's command to its end: a process that receives lanes through a socket.

    There is one lane, or one for each of the drivers that follow one another. Only the launching thread sends on the
    socket and closes it: the number of a closed descriptor may be reused at once.
    """

    def __init__(self, keeper: Keeper, asked: commands.Start) -> None:
        self.token = asked.token
        self.name = asked.name
        self.env = asked.env
        self.tail = Tail()
        self.process: WorkerProcess | None = None
        self.gone = threading.Event()  # set when the process has ended
        self._imports = asked.imports
        self._keeper = keeper
        self._killed = False
        self._end_told = self._has_lane = False
        self._door: socket.socket

    # -- on the launching thread

    def start(self, env: Mapping[str, str], base: Mapping[str, str]) -> None:
        """Start the process, which waits for a lane.

        Raises:
            OSError: The process can't be started; nothing is left.
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
        if self._killed:  # just now: the killing thread may have missed the process
            process.kill()

    def hand_over(self, lane: socket.socket, epoch: int, tls: wire.Tls | None, token: bytes, *, first: bool) -> None:
        """Send a lane to the worker, with the token for a new TLS handshake with the driver.

        With an epoch, the worker may receive other lanes later.
        """
        with lane, contextlib.suppress(OSError):  # the worker has just died, and the exit is reported
            socket.send_fds(self._door, [b"%d " % epoch + wire.hand_on(lane, tls, token)], [lane.fileno()])
            self._has_lane = True
        if not epoch:
            self._door.close()
        elif first:
            with contextlib.suppress(ClosedError):  # just closed
                self._keeper.event_loop.watch(self._door.fileno(), self._answered)
                if self.gone.is_set():  # perhaps already before `watch`
                    self._keeper.event_loop.unwatch(self._door.fileno())

    def cut(self) -> None:
        """Tell the worker to drop the lane: the driver at the other end no longer commands."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # the worker has just died
                self._door.send(CUT)

    # -- on the event loop's thread

    def kill(self, astray: bool = False) -> None:
        """Kill the worker; `astray`: for going on after closing the lane, which the exit reports."""
        self._killed = True
        if self.process is None:
            self.tell_end(None, None, None)
        elif astray:
            self.process.end_astray()
        else:
            self.process.kill()

    def reap(self) -> None:
        """Kill the worker and wait, instead of an event loop that has ended."""
        if self.process is not None:
            self.process.reap()

    def look(self, number: int) -> None:
        """Send the driver an inspection from outside as the answer to a numbered question."""
        if self.process is not None:
            self.process.look(lambda what: self._keeper._tell(commands.Inspected(self.token, number, what)))

    def look_inside(self, number: int) -> None:
        """Ask the worker for a status report; the answer arrives in `_answered`."""
        if self._has_lane:  # without a lane the worker couldn't tell a look from one
            with contextlib.suppress(OSError):  # the worker has just died, or reads nothing
                self._door.send(LOOK + b"%d" % number, socket.MSG_DONTWAIT)

    def said(self, line: str) -> None:
        self.tail.append(line)
        self._keeper._tell(commands.Said(self.token, line))

    def ended(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        self.tell_end(exitcode, signal, detail)
        self.gone.set()
        self._keeper._close_later(self._door)

    def tell_end(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Report the exit to the driver, once; the process may never have started."""
        if not self._end_told:
            self._end_told = True
            self._keeper._tell(commands.Ended(self.token, exitcode, signal, detail))
            self._keeper._forget(self, (exitcode, signal, detail))

    def _answered(self) -> None:
        try:
            answer = self._door.recv(GIVEN_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the worker has ended with unread data
            answer = b""
        if answer:
            number, _, status = answer.partition(b" ")
            self._keeper._seen(self, int(number), status)
        else:  # the worker has ended
            self._keeper.event_loop.unwatch(self._door.fileno())
