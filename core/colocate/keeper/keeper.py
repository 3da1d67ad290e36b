"""The far side: a keeper in some process of the engine, and the worker processes that it starts for its driver.

The driver dials it and says by a token what the connection is: its commands (`_protocol.commands`), or the lane of a
worker, which is handed to that worker as it is. When the connection of the commands ends, the driver has let go of the
keeper or is gone: the workers are killed. One whose pool may be detached (`leased.py`) has one driver after the other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

import colocate
from colocate import wire
from colocate._protocol import commands
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Requests
from colocate._system.limits import DIALLED_WITHIN_S, LOOKED_AT_WITHIN_S
from colocate.errors import ClosedError
from colocate.executor import Lease, Running
from colocate.keeper import forks
from colocate.keeper.greeting import COMMANDS, NEWCOMER, Greeting
from colocate.keeper.launcher import Launcher
from colocate.keeper.leased import Leased
from colocate.keeper.started import DoorProcess, StartedWorker
from colocate.worker.birth import processes

_ENDS_AGAIN_S = 0.5


class Keeper:
    """Starts, watches and ends the workers of one slot. Made in any process on the slot's machine.

    Args:
        key: The secret that the driver knows (`Keepers.key`).
        host: Address under which other machines reach this one; None when the driver is on this machine.
        bind: Address to listen on, where that isn't `host`: "0.0.0.0" behind a translation of addresses.
        ports: The first and the last port of those to listen on, where others are closed; None for any.
        cut_s: How long nothing may be heard of the driver's machine until its connections are taken for cut.
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
        cut_s: float = wire.CUT_AFTER_S,
        env: Mapping[str, str] | None = None,
        tls: wire.Tls | None = None,
        name: str = "",
        detachable: bool = False,
        dialled_within_s: float | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = f"{name}#{secrets.token_hex(4)}"  # there may be several of one name in a process
        self._base = {**os.environ, **_importable()}
        self._env = {**self._base, **(env or {})}
        self._starts = env is not None
        self._tls = tls
        self._on_end = on_end
        self._cut_s = cut_s
        # First: it may raise, and there is nothing to be undone yet.
        listeners = wire.listen_widely(host, tls, bind=bind, ports=ports, what=f"a keeper of {name or 'a pool'}")
        self.hub = wire.Hub("keeper", on_death=self._hub_ended)
        self._launcher = Launcher()
        self._launcher.start()  # now, when whoever makes it is told that no thread is to be had
        self._leased = Leased() if detachable else None
        self._driver: _Driver | None = None
        self._dialled = False
        self._workers: dict[bytes, StartedWorker] = {}
        self._lanes: dict[bytes, socket.socket] = {}  # those whose worker hasn't been asked for yet
        self._tickets: dict[bytes, bytes] = {}  # of lanes to workers that run: the workers' tokens
        self._looks: Requests[bytes, bytes] = Requests()
        self._departed: dict[bytes, tuple[list[str], tuple[Any, ...]]] = {}  # last words and ends, for newcomers
        self._greetings: set[socket.socket] = set()
        self._started: list[DoorProcess] = []  # the launching thread's: all that may still be there
        self._lock = threading.Lock()
        self._over = False
        self._closed = threading.Event()
        self.address = ",".join(listener.address for listener in listeners)
        for listener in listeners:
            self.hub.listen(listener, key, self._greet)
        self.hub.later(dialled_within_s or DIALLED_WITHIN_S, self._check_dialled)
        if self._starts:
            forks.hold(self._base)

    def close(self) -> None:
        """End the workers and close everything; all is gone when this returns. From any thread but the hub's."""
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
            self.hub.close()
            for sock in (*self._lanes.values(), *self._greetings):
                sock.close()
        finally:
            self._closed.set()

    def _end(self) -> None:
        """On the launching thread, so that nothing is started afterwards."""
        for process in self._started:  # also those of workers that were killed, and forgotten, before they had theirs
            process.drop()
        for process in self._started:
            process.gone.wait()

    # -- on the hub's thread

    def _greet(self, sock: socket.socket) -> None:
        self._greetings.add(sock)
        wire.cut_after(sock, self._cut_s)
        with contextlib.suppress(ClosedError):  # just now: `close` closes it
            Greeting(self.hub, self._connected, sock)

    def _connected(self, token: bytes | None, sock: socket.socket) -> None:
        self._greetings.discard(sock)
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
                caller = _Driver(self, sock)
            except ClosedError:  # just now
                sock.close()
                return
            if token == COMMANDS:
                self._driver, self._dialled = caller, True

    def told(self, by: _Driver, message: Message) -> None:
        """Somebody has said something."""
        if by is self._driver:
            _COMMANDS[type(message)](self, message)
        elif self._leased is not None and isinstance(message, commands.Attach):
            self._attach(by, self._leased, message)
        elif self._leased is not None and isinstance(message, commands.Look):
            by.say(commands.Seen(None if self._leased.lease is None else self._leased.seen()))
        elif self._leased is not None and isinstance(message, commands.LookInside):
            self._look_inside(by)

    def _look_inside(self, by: _Driver) -> None:
        asked = self._looks.open(self._workers)
        for worker in list(self._workers.values()):
            worker.look_inside(asked.token)

        def tell() -> None:
            silent = [worker.name for token, worker in self._workers.items() if token in asked.owing]
            by.say(commands.SeenInside(list(asked.answers.values()), silent))

        asked.then(tell)
        self.hub.later(LOOKED_AT_WITHIN_S, partial(self._looks.drop, asked))

    def seen(self, worker: StartedWorker, number: int, what: bytes) -> None:
        """A worker says what it does."""
        self._looks.answered(number, worker.token, what)

    def _told_to_list(self, asked: commands.List) -> None:
        self._launcher.soon(partial(self._list, asked.token))  # there, so that nothing is being started meanwhile

    def _start(self, start: commands.Start) -> None:
        self._workers[start.token] = worker = StartedWorker(self, start.token, start.env, start.name, start.imports)
        if start.token in self._lanes:
            self._launcher.soon(partial(self._hand_over, worker, start.token))

    def _kill(self, kill: commands.Kill) -> None:
        if (doomed := self._workers.get(kill.token)) is not None:  # otherwise it has ended by itself
            doomed.kill(kill.astray)

    def _inspect(self, asked: commands.Inspect) -> None:
        if (worker := self._workers.get(asked.token)) is not None:
            worker.look(asked.number)

    def _let_go(self) -> None:
        try:
            threading.Thread(target=self._leave, name="colocate-keeper-end", daemon=True).start()
        except RuntimeError:  # no thread is to be had, and its end has to come
            self.hub.later(_ENDS_AGAIN_S, self._let_go)

    def _hub_ended(self, reason: str) -> None:
        for process in list(self._started):
            process.reap()
        self._let_go()

    def _leave(self) -> None:
        self.close()
        self._on_end()

    def _check_dialled(self) -> None:
        if not self._dialled:
            self._let_go()

    def tell(self, message: Message) -> None:
        """Tell the driver something."""
        if self._driver is not None:
            self._driver.say(message)

    def forget(self, worker: StartedWorker, exit: tuple[Any, ...]) -> None:
        """A worker has ended."""
        self._workers.pop(worker.token, None)
        if self._leased is not None and self._leased.lease is not None and worker.token in self._leased.lease.workers:
            self._departed[worker.token] = list(worker.tail), exit
        if (sock := self._lanes.pop(worker.token, None)) is not None:
            sock.close()

    # -- from driver to driver, on the hub's thread

    def left(self, driver: _Driver) -> None:
        """The connection of somebody has ended."""
        if driver is not self._driver:
            return
        self._driver = None
        leased = self._leased
        if leased is None or leased.lease is None or leased.owned:
            self._let_go()
            return
        self._cut(leased.lease)
        self.hub.later(leased.vacate(), partial(self._expire, leased.vacancies))

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

    def _expire(self, vacancies: int) -> None:
        leased = self._leased
        if self._driver is None and leased is not None and leased.vacancies == vacancies:
            self._let_go()

    def _attach(self, newcomer: _Driver, leased: Leased, asked: commands.Attach) -> None:
        refusal = leased.refusal(asked.epoch, asked.own)
        if refusal is not None:
            newcomer.say(commands.Refused(*refusal))
            return
        assert leased.lease is not None
        former, self._driver = self._driver, newcomer
        leased.grant(asked.epoch, asked.who, asked.own)
        if former is not None:
            former.say(commands.Fenced(f"{asked.who} (epoch {leased.epoch})"))
            former.lane.close("another driver has it now")
        self._cut(leased.lease)
        newcomer.say(commands.Granted(leased.epoch, leased.lease.record))

    def _detach(self, command: commands.Detach) -> None:
        if self._leased is not None:
            self._leased.lease, self._leased.owned = command.lease, False
            self.tell(commands.Confirmed(command.token))

    def _retain(self, command: commands.Retain) -> None:
        if self._leased is not None:
            self._leased.lease, self._leased.owned = None, True
            if command.token is not None:
                self.tell(commands.Confirmed(command.token))

    def _renew(self, command: commands.Renew) -> None:
        if self._leased is not None and self._leased.lease is not None:
            self._leased.lease = command.lease

    def _give_up(self, command: commands.GiveUp) -> None:
        driver, leased = self._driver, self._leased
        assert driver is not None
        if leased is not None and leased.lease is not None:
            leased.owned = False  # one that took it lets it go on
        self.left(driver)
        driver.lane.close("it has let go")

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
            self.tell(commands.Said(token, line))
        self.tell(commands.Ended(token, *exit))
        if (sock := self._lanes.pop(ticket, None)) is not None:
            sock.close()

    # -- on the launching thread

    def _list(self, token: int) -> None:
        """What the operating system says of the processes started here: known to the driver, or not."""
        workers = {worker.process.pid: worker.name for worker in list(self._workers.values())}
        found = [
            Running("worker", workers.get(child.started) or f"process {child.pid}", pid=child.pid, since=child.since)
            for child in processes.below_this()
            if child.started in workers or child.label == self.label
        ]
        found += [each.running() for each in processes.left_by(os.getpid()) if each.label in ("", self.label)]
        self.tell(commands.Listed(token, [attrs.astuple(each) for each in found]))

    def _hand_over(self, worker: StartedWorker, token: bytes) -> None:
        lane = self._lanes.pop(token, None)
        if lane is None:  # it has been killed meanwhile
            return
        if self._over:
            lane.close()
            return
        if worker.door_process is not None:
            worker.door_process.pass_on(lane, self._epoch, self._tls, token)
            return
        self._started = [each for each in self._started if not each.gone.is_set()]
        env = {**self._env, **worker.env}
        try:
            process = DoorProcess(self.hub, env, self._base, self.label, worker.imports)
        except (OSError, ValueError) as error:  # no descriptor is left, or a variable can't be one
            lane.close()
            self.hub.later(0.0, partial(worker.failed, f"{type(error).__name__}: {error}"))
            return
        self._started.append(process)
        process.give(worker, lane, self._epoch, self._tls, token)

    @property
    def _epoch(self) -> int:
        """That of the driver; 0 when none can follow it."""
        return self._leased.epoch if self._leased is not None else 0


_COMMANDS: dict[type[Message], Callable[[Keeper, Any], None]] = {
    commands.Start: Keeper._start,
    commands.Kill: Keeper._kill,
    commands.Inspect: Keeper._inspect,
    commands.List: Keeper._told_to_list,
    commands.Adopt: Keeper._adopt,
    commands.Detach: Keeper._detach,
    commands.Renew: Keeper._renew,
    commands.Retain: Keeper._retain,
    commands.GiveUp: Keeper._give_up,
}


class _Driver:
    """A connection of somebody who commands, would like to, or asks."""

    def __init__(self, keeper: Keeper, sock: socket.socket) -> None:
        self._keeper = keeper
        self.lane = keeper.hub.attach(sock, self._told, self._closed)

    def say(self, message: Message) -> None:
        """Tell it something."""
        self.lane.send(message.head())

    def _told(self, head: Head, body: Any) -> None:
        self._keeper.told(self, read(head))

    def _closed(self, reason: str) -> None:
        self._keeper.left(self)


def _importable() -> dict[str, str]:
    """An environment in which this very colocate is found, however this process has come to find it."""
    here = str(Path(colocate.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))}
