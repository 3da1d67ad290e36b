"""The far side: a keeper in some process of the cluster, and the worker processes that it starts for its driver.

The driver dials it and says by a token what the connection is: its commands (`_protocol.commands`), or the lane of a
worker, which is handed to that worker as it is. When the connection of the commands ends, the driver has let go of the
keeper or is gone: the workers are killed. One whose pool may be detached (`Leased`) has one driver after the other.
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
    """Who commands a keeper: one driver at a time, each by a higher epoch than the one before; for a while, nobody.

    A keeper whose pool may be detached has one. Until that is detached, the end of its driver is its end, as for any
    other. The lead keeper of a pool has the record and decides who may have it; the others take the lead's word, which
    is an epoch higher than theirs.
    """

    epoch: int = 1  # that of the driver that commands it, or did last
    owned: bool = True  # whether the end of that driver is the end of all
    lease: Lease | None = None  # that of the last detach; None before the first
    who: str = ""  # who commands it, in words; empty when nobody does
    since: float = attrs.field(factory=time.time)  # since when, in seconds of time.time()
    vacancies: int = 0  # how often it has been without a driver
    ends: float | None = None  # when the time to live is over, by time.monotonic(); None while somebody commands it

    def refusal(self, epoch: int, own: bool) -> tuple[str, str] | None:
        """Return why a newcomer can't have it: a kind and words; None when it can."""
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
        """Have a newcomer command from now on."""
        self.epoch = epoch or self.epoch + 1
        self.owned, self.who, self.since, self.ends = own, who, time.time(), None

    def vacate(self) -> float:
        """Have nobody command from now on; return how long it lives like that."""
        assert self.lease is not None
        left = self.lease.ttl if self.lease.lead else self.lease.ttl + LEAD_SLACK_S
        self.vacancies += 1
        self.who, self.since, self.ends = "", time.time(), time.monotonic() + left
        return left

    def seen(self) -> dict[str, Any]:
        """Return what listings show."""
        assert self.lease is not None
        left = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        return {
            "name": self.lease.name,
            "answers": True,
            "epoch": self.epoch,
            "driver": self.who or None,
            "owned": self.owned,
            "ttl_s": self.lease.ttl,
            "left_s": left,
            "since": self.since,
            **self.lease.about,
        }


class Keeper:
    """Starts, watches and ends the workers of one slot. Made in any process on the slot's machine.

    Args:
        key: The secret that the driver knows (`Keepers.key`).
        host: Address under which other machines reach this one; None when the driver is on this machine.
        bind: Address to listen on, where that isn't `host`: "0.0.0.0" behind a translation of addresses.
        ports: The first and the last port of those to listen on, where others are closed; None for any.
        cut_s: How long nothing may be heard of the driver's machine until its connections are taken for cut
            (`Request.cut_s`); None for what is usual within a cluster.
        env: Environment of the workers on top of this process's own; None when there will be no workers.
        tls: What connections with other machines are encrypted with; None leaves them in clear text.
        name: Whose it is (`Request.id`), for whoever looks at the processes of its machine.
        detachable: Whether other drivers may follow the first one, once that has said so.
        dialled_within_s: How long the first driver is waited for.
        on_end: Called once, on a thread of its own, when the driver has let go of the keeper or is gone, and everything
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
        self.label = f"{name}#{secrets.token_hex(4)}"  # there may be several of one name in a process
        # In it this very colocate is found, however this process has come to find it.
        path = [os.environ.get("PYTHONPATH"), str(Path(colocate.__file__).parent.parent)]
        self._base = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._env = {**self._base, **(env or {})}
        self._starts = env is not None
        self._tls = tls
        self._on_end = on_end
        self._cut_s = wire.CUT_AFTER_S if cut_s is None else cut_s
        # First: it may raise, and there is nothing to be undone yet.
        listeners = wire.listen_widely(host, tls, bind=bind, ports=ports, what=f"a keeper of {name or 'a pool'}")
        self.event_loop = wire.EventLoop("keeper", on_death=self._hub_ended)
        self._launcher = Launcher()
        self._launcher.start()  # now, when whoever makes it is told that no thread is to be had
        self._leased = Leased() if detachable else None
        self._driver: wire.SocketLane | None = None
        self._dialled = False
        self._workers: dict[bytes, _StartedWorker] = {}
        self._lanes: dict[bytes, socket.socket] = {}  # those whose worker hasn't been asked for yet
        self._tickets: dict[bytes, bytes] = {}  # of lanes to workers that run: the workers' tokens
        self._looks: Requests[bytes, bytes] = Requests()
        self._departed: dict[bytes, tuple[list[str], tuple[Any, ...]]] = {}  # last words and ends, for newcomers
        self._greetings: set[socket.socket] = set()
        self._started: list[_StartedWorker] = []  # the launching thread's: all that may still be there
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
        """End the workers and close everything; all is gone when this returns. From any thread but the event loop's."""
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
        for worker in self._started:  # also those that were killed, and forgotten, before they had their process
            worker.kill()
        for worker in self._started:
            worker.gone.wait()

    # -- on the event loop's thread

    def _greet(self, sock: socket.socket) -> None:
        """Read what a connection says first: what it is."""
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

        with contextlib.suppress(ClosedError):  # just now: `close` closes it
            self.event_loop.watch(sock.fileno(), read_token)
            read_token()  # through TLS it may have come already, which the kernel doesn't know

    def _connected(self, token: bytes | None, sock: socket.socket) -> None:
        if token is None:  # it has gone again
            sock.close()
        elif token not in (COMMANDS, NEWCOMER):
            self._lanes[token] = sock
            if (worker := self._workers.get(self._tickets.get(token, token))) is not None:
                self._launcher.soon(partial(self._hand_over, worker, token))
        elif self._over or (token == COMMANDS and self._dialled) or (token == NEWCOMER and self._leased is None):
            sock.close()  # it is another driver's
        else:
            try:
                caller = self.event_loop.attach(
                    sock, lambda head, body: self._told(caller, read(head)), lambda reason: self._left(caller)
                )
            except ClosedError:  # just now
                sock.close()
                return
            if token == COMMANDS:
                self._driver, self._dialled = caller, True

    def _told(self, by: wire.SocketLane, message: Message) -> None:
        """Do what the driver commands, or answer somebody who would like to command, or only asks."""
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
                if (doomed := self._workers.get(message.token)) is not None:  # otherwise it has ended by itself
                    doomed.kill(message.astray)
            case commands.Inspect():
                if (worker := self._workers.get(message.token)) is not None:
                    worker.look(message.number)
            case commands.List():  # on that thread, so that nothing is being started meanwhile
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
                    leased.owned = False  # one that took it lets it go on
                self._left(driver)
                driver.close("it has let go")

    def _look_inside(self, by: wire.SocketLane) -> None:
        asked = self._looks.open(self._workers)
        for worker in list(self._workers.values()):
            worker.look_inside(asked.token)

        def tell() -> None:
            silent = [worker.name for token, worker in self._workers.items() if token in asked.owing]
            by.send(commands.SeenInside(list(asked.answers.values()), silent).head())

        asked.then(tell)
        self.event_loop.later(LOOKED_AT_WITHIN_S, partial(self._looks.drop, asked))

    def _seen(self, worker: _StartedWorker, number: int, what: bytes) -> None:
        """Note what a worker says that it does."""
        self._looks.answered(number, worker.token, what)

    def _let_go(self) -> None:
        try:
            Thread(target=self._leave, name="colocate-keeper-end").start()
        except RuntimeError:  # no thread is to be had, and its end has to come
            self.event_loop.later(_ENDS_AGAIN_S, self._let_go)

    def _hub_ended(self, reason: str) -> None:
        for worker in list(self._started):
            worker.reap()
        self._let_go()

    def _leave(self) -> None:
        self.close()
        self._on_end()

    def _tell(self, message: Message) -> None:
        """Tell the driver something."""
        if self._driver is not None:
            self._driver.send(message.head())

    def _forget(self, worker: _StartedWorker, exit: tuple[Any, ...]) -> None:
        """Forget a worker that has ended, but for its last words where a later driver may ask for them."""
        self._workers.pop(worker.token, None)
        if self._leased is not None and self._leased.lease is not None and worker.token in self._leased.lease.workers:
            self._departed[worker.token] = list(worker.tail), exit
        if (sock := self._lanes.pop(worker.token, None)) is not None:
            sock.close()

    def _close_later(self, door: socket.socket) -> None:
        """Close a worker's socket, where nothing is sent to it just now."""
        if door.fileno() >= 0:
            self.event_loop.unwatch(door.fileno())
        self._launcher.soon(door.close)

    # -- from driver to driver, on the event loop's thread

    def _left(self, driver: wire.SocketLane) -> None:
        """End everything, or what mustn't stay, when the connection of the driver has ended."""
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
        """End what a driver has here that no longer commands, but for the workers that stay."""
        for sock in list(self._lanes.values()):  # the launching thread takes from them
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
        """Tell what the operating system says of the processes started here: known to the driver, or not."""
        workers = {worker.process.pid: worker.name for worker in list(self._workers.values()) if worker.process}
        found = [
            Running("worker", workers.get(child.started) or f"process {child.pid}", pid=child.pid, since=child.since)
            for child in processes.below_this()
            if child.started in workers or child.label == self.label
        ]
        found += [each.running() for each in processes.left_by(os.getpid()) if each.label in ("", self.label)]
        self._tell(commands.Listed(token, [attrs.astuple(each) for each in found]))

    def _hand_over(self, worker: _StartedWorker, token: bytes) -> None:
        """Hand a lane over to its worker, which is started if it hasn't been."""
        lane = self._lanes.pop(token, None)
        if lane is None:  # it has been killed meanwhile
            return
        if self._over:
            lane.close()
            return
        epoch = self._leased.epoch if self._leased is not None else 0  # 0: no other driver can follow this one
        first = worker.process is None
        if first:
            self._started = [each for each in self._started if not each.gone.is_set()]
            try:
                worker.start({**self._env, **worker.env}, self._base)
            except (OSError, ValueError) as error:  # no descriptor is left, or a variable can't be one
                lane.close()
                words = f"it could not be started: {type(error).__name__}: {error}"
                self.event_loop.later(0.0, partial(worker.tell_end, None, None, words))
                return
            self._started.append(worker)
        worker.hand_over(lane, epoch, self._tls, token, first=first)


class _StartedWorker:
    """A worker of a keeper, from the driver's command to its end: a process, to which lanes are handed by a socket.

    It is given one lane, or those of the drivers that follow one another. The socket is closed on the launching thread,
    as what is sent there is: the number of one that is closed may be another's at once.
    """

    def __init__(self, keeper: Keeper, asked: commands.Start) -> None:
        self.token = asked.token
        self.name = asked.name
        self.env = asked.env
        self.tail = Tail()
        self.process: WorkerProcess | None = None
        self.gone = threading.Event()  # its process has ended
        self._imports = asked.imports
        self._keeper = keeper
        self._killed = False
        self._end_told = self._has_lane = False
        self._door: socket.socket

    # -- on the launching thread

    def start(self, env: Mapping[str, str], base: Mapping[str, str]) -> None:
        """Start its process, which waits for a lane.

        Raises:
            OSError: It can't be started; nothing is left.
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
        if self._killed:  # just now: whoever has killed it may not have seen the process
            process.kill()

    def hand_over(self, lane: socket.socket, epoch: int, tls: wire.Tls | None, token: bytes, *, first: bool) -> None:
        """Give it a lane: by its token it and the driver know each other, where they make TLS anew.

        It may be given another lane later, if it is told an epoch.
        """
        with lane, contextlib.suppress(OSError):  # it has just died, and its end is told
            socket.send_fds(self._door, [b"%d " % epoch + wire.hand_on(lane, tls, token)], [lane.fileno()])
            self._has_lane = True
        if not epoch:
            self._door.close()
        elif first:
            with contextlib.suppress(ClosedError):  # just now
                self._keeper.event_loop.watch(self._door.fileno(), self._answered)
                if self.gone.is_set():  # and perhaps before this
                    self._keeper.event_loop.unwatch(self._door.fileno())

    def cut(self) -> None:
        """Have it let go of its lane: the driver at the other end no longer commands."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # it has just died
                self._door.send(CUT)

    # -- on the event loop's thread

    def kill(self, astray: bool = False) -> None:
        """End it; because it has closed its lane, or without a reason that would be told."""
        self._killed = True
        if self.process is None:
            self.tell_end(None, None, None)
        elif astray:
            self.process.end_astray()
        else:
            self.process.kill()

    def reap(self) -> None:
        """End it in the place of an event loop that does nothing any more."""
        if self.process is not None:
            self.process.reap()

    def look(self, number: int) -> None:
        """Answer the driver's question of this number: what is seen of it from outside."""
        if self.process is not None:
            self.process.look(lambda what: self._keeper._tell(commands.Inspected(self.token, number, what)))

    def look_inside(self, number: int) -> None:
        """Ask it what it does; it answers by itself."""
        if self._has_lane:  # what comes first is one
            with contextlib.suppress(OSError):  # it has just died, or reads nothing
                self._door.send(LOOK + b"%d" % number, socket.MSG_DONTWAIT)

    def said(self, line: str) -> None:
        """Tell the driver a line of its output."""
        self.tail.append(line)
        self._keeper._tell(commands.Said(self.token, line))

    def ended(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Tell the end of its process."""
        self.tell_end(exitcode, signal, detail)
        self.gone.set()
        self._keeper._close_later(self._door)

    def tell_end(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Tell its end, once: there may never have been a process."""
        if not self._end_told:
            self._end_told = True
            self._keeper._tell(commands.Ended(self.token, exitcode, signal, detail))
            self._keeper._forget(self, (exitcode, signal, detail))

    def _answered(self) -> None:
        """Pass on what it says that it does."""
        try:
            answer = self._door.recv(GIVEN_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended with something unread
            answer = b""
        if answer:
            number, _, what = answer.partition(b" ")
            self._keeper._seen(self, int(number), what)
        else:  # it has ended
            self._keeper.event_loop.unwatch(self._door.fileno())
