"""The far side: a keeper in some process of the engine, and the worker processes that it starts for one driver.

The driver dials it and says by a token what the connection is: its commands, or the lane of a worker, which is handed
to that worker as it is. Commands are `start`, `kill` and `list`; the keeper tells `said`, `ended` and `listed`. When
the connection of the commands ends, the driver has let go of the keeper or is gone: the workers are killed.
"""

from __future__ import annotations

import contextlib
import json
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
from colocate import _processes, wire
from colocate.errors import ClosedError
from colocate.keeper.launcher import Launcher
from colocate.keeper.process import WorkerProcess

TOKEN_BYTES = 16
COMMANDS = bytes(TOKEN_BYTES)  # the token of the connection that carries the commands

# A driver that reserves a slot dials its keeper at once; one that doesn't has gone meanwhile.
_DIALLED_WITHIN_S = 60.0


class Keeper:
    """Starts, watches and ends the workers of one slot. Made in any process on the slot's machine.

    Args:
        key: The secret that the driver knows (`Keepers.key`).
        host: Address under which other machines reach this one; None when the driver is on this machine.
        env: Environment of the workers on top of this process's own. A first one is started at once with it.
        tls: What connections with other machines are encrypted with; None leaves them in clear text.
        name: Whose it is (`Request.id`), for whoever looks at the processes of its machine.
        on_end: Called once, on a thread of its own, when the driver has let go of the keeper or is gone, and everything
            here has been ended.
    """

    def __init__(
        self,
        key: bytes,
        *,
        host: str | None = None,
        env: Mapping[str, str] | None = None,
        tls: wire.Tls | None = None,
        name: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = f"{name}#{secrets.token_hex(4)}"  # there may be several of one name in a process
        self._env = {**os.environ, **_importable(), **(env or {})}
        self._tls = tls
        self._on_end = on_end
        self._hub = wire.Hub("keeper")
        self._launcher = Launcher()
        self._driver: wire.SocketLane | None = None
        self._workers: dict[bytes, _Worker] = {}
        self._lanes: dict[bytes, socket.socket] = {}  # those whose worker hasn't been asked for yet
        self._greetings: set[socket.socket] = set()
        self._spare: _Spare | None = None
        self._lock = threading.Lock()
        self._over = False
        listeners = wire.listen_widely(host, tls)
        self.address = ",".join(listener.address for listener in listeners)
        for listener in listeners:
            self._hub.listen(listener, key, self._greet)
        self._hub.later(_DIALLED_WITHIN_S, self._check_dialled)
        self._launcher.soon(self._warm)

    def close(self) -> None:
        """End the workers and close everything. Idempotent; from any thread but the hub's."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._launcher.run(self._end)
        self._launcher.close()
        self._hub.close()
        for sock in (*self._lanes.values(), *self._greetings):
            sock.close()

    def _end(self) -> None:
        """On the launching thread, so that nothing is started afterwards."""
        if self._spare is not None:
            self._spare.drop()
            self._spare.gone.wait()
        for worker in list(self._workers.values()):
            if worker.process is not _NO_PROCESS:
                worker.process.kill()
                worker.gone.wait()

    # -- on the hub's thread

    def _greet(self, sock: socket.socket) -> None:
        self._greetings.add(sock)
        with contextlib.suppress(ClosedError):  # just now: `close` closes it
            _Greeting(self._hub, self._connected, sock)

    def _connected(self, token: bytes | None, sock: socket.socket) -> None:
        self._greetings.discard(sock)
        if token is None:  # it has gone again
            sock.close()
        elif token != COMMANDS:
            self._lanes[token] = sock
            if (worker := self._workers.get(token)) is not None:
                self._launcher.soon(partial(self._hand_over, worker))
        elif self._driver is None and not self._over:
            try:
                self._driver = self._hub.attach(sock, self._told, self._let_go)
            except ClosedError:  # just now
                sock.close()
        else:
            sock.close()  # it is another driver's

    def _told(self, head: tuple[Any, ...], body: Any) -> None:
        command, token, *rest = head
        if command == "list":
            self._launcher.soon(partial(self._list, token))  # there, so that nothing is being started meanwhile
        elif command == "start":
            self._workers[token] = worker = _Worker(self, token, *rest)
            if token in self._lanes:
                self._launcher.soon(partial(self._hand_over, worker))
        elif (doomed := self._workers.get(token)) is not None:  # otherwise it has ended by itself
            doomed.kill()

    def _let_go(self, reason: str) -> None:
        threading.Thread(target=self._leave, name="colocate-keeper-end", daemon=True).start()

    def _leave(self) -> None:
        self.close()
        self._on_end()

    def _check_dialled(self) -> None:
        if self._driver is None:
            self._let_go("nobody has dialled")

    def tell(self, *head: Any) -> None:
        """Tell the driver something."""
        if self._driver is not None:
            self._driver.send(head)

    def forget(self, token: bytes) -> None:
        """A worker has ended."""
        self._workers.pop(token, None)
        if (sock := self._lanes.pop(token, None)) is not None:
            sock.close()

    # -- on the launching thread

    def _list(self, question: bytes) -> None:
        """What the operating system says of the processes started here: known to the driver, or not."""
        workers = {worker.process.pid: worker.name for worker in list(self._workers.values())}
        spare = self._spare.pid if self._spare is not None else 0
        found = [
            (workers.get(child.pid), child.pid, child.since)
            for child in _processes.below_this()
            if child.pid != spare and (child.pid in workers or child.label == self.label)
        ]
        self.tell("listed", question, found)

    def _warm(self) -> None:
        if not self._over:
            try:
                self._spare = _Spare(self._hub, self._env, self.label)
            except OSError:  # `start` will say why
                self._spare = None

    def _hand_over(self, worker: _Worker) -> None:
        lane = self._lanes.pop(worker.token, None)
        if lane is None:  # it has been killed meanwhile
            return
        if self._over:
            lane.close()
            return
        spare, self._spare = self._spare, None
        env = {**self._env, **worker.env}
        if spare is not None and (env != self._env or not spare.waits):
            spare.drop()
            spare = None
        try:
            if spare is None:
                spare = _Spare(self._hub, env, self.label)
        except OSError as error:
            lane.close()
            self._hub.later(0.0, partial(worker.failed, f"{type(error).__name__}: {error}"))
            return
        spare.give(worker, lane, self._tls)


class _Worker:
    """One worker of a keeper, from the driver's command to its end."""

    def __init__(self, keeper: Keeper, token: bytes, env: Mapping[str, str], name: str) -> None:
        self.token = token
        self.name = name
        self.env = env
        self.killed = False
        self.gone = threading.Event()
        self._keeper = keeper
        self.process: WorkerProcess = _NO_PROCESS

    def kill(self) -> None:
        self.killed = True
        if self.process is _NO_PROCESS:
            self.ended(None, None)
        else:
            self.process.kill()

    def said(self, line: str) -> None:
        self._keeper.tell("said", self.token, line)

    def ended(self, exitcode: int | None, signal: str | None) -> None:
        self._report(exitcode, signal, None)

    def failed(self, why: str) -> None:
        self._report(None, None, f"it could not be started: {why}")

    def _report(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        if not self.gone.is_set():
            self._keeper.tell("ended", self.token, exitcode, signal, detail)
            self._keeper.forget(self.token)
            self.gone.set()


class _Spare:
    """A process that waits for its lane: the interpreter and what a worker imports take a while."""

    def __init__(self, hub: wire.Hub, env: Mapping[str, str], label: str) -> None:
        self._worker: _Worker | None = None
        self._ended: tuple[int | None, str | None] | None = None
        self._said: list[str] = []
        self._lock = threading.Lock()
        self.gone = threading.Event()
        self._process = WorkerProcess(hub, self)
        self._door, theirs = socket.socketpair()
        try:
            with theirs:
                self._process.start(env, theirs, waits=True, label=label)
        except BaseException:
            self._door.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def waits(self) -> bool:
        """Whether it can still be given a lane."""
        return self._ended is None

    def give(self, worker: _Worker, lane: socket.socket, tls: wire.Tls | None) -> None:
        """Make it a worker."""
        # When it has just died, its end is told as this worker's.
        with lane, self._door, contextlib.suppress(OSError):
            told = wire.NO_TLS if tls is None else json.dumps(attrs.asdict(tls)).encode()
            socket.send_fds(self._door, [told], [lane.fileno()])
        with self._lock:
            worker.process = self._process
            self._worker, ended = worker, self._ended
        for line in self._said:
            worker.said(line)
        if ended is not None:  # it had ended already
            worker.ended(*ended)
        elif worker.killed:
            self._process.kill()

    def drop(self) -> None:
        """It isn't needed."""
        self._process.kill()
        self._door.close()

    # -- on the hub's thread

    def said(self, line: str) -> None:
        if self._worker is None:
            self._said.append(line)
        else:
            self._worker.said(line)

    def ended(self, exitcode: int | None, signal: str | None) -> None:
        with self._lock:
            self._ended = exitcode, signal
            worker = self._worker
        if worker is not None:
            worker.ended(exitcode, signal)
        self.gone.set()


class _Greeting:
    """A connection that has yet to say what it is."""

    def __init__(self, hub: wire.Hub, then: Callable[[bytes | None, socket.socket], None], sock: socket.socket) -> None:
        self._hub = hub
        self._then = then
        self._sock = sock
        self._token = b""
        hub.watch(sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            part = self._sock.recv(TOKEN_BYTES - len(self._token))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._token += part
        if part and len(self._token) < TOKEN_BYTES:
            return
        self._hub.unwatch(self._sock.fileno())
        self._then(self._token if part else None, self._sock)


class _NoProcess(WorkerProcess):
    """Stands where a worker's process will be."""

    def __init__(self) -> None:
        pass

    @property
    def pid(self) -> int:
        """There is none."""
        return 0

    def kill(self) -> None:
        """There is nothing to end."""


_NO_PROCESS = _NoProcess()


def _importable() -> dict[str, str]:
    """An environment in which this very colocate is found, however this process has come to find it."""
    here = str(Path(colocate.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))}
