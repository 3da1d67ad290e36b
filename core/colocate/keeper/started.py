"""A worker of a keeper, from the driver's command to its end; and the process that becomes one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from colocate import wire
from colocate._protocol.commands import Ended, Inspected, Said
from colocate._protocol.message import Message
from colocate.errors import ClosedError
from colocate.keeper.process import WorkerProcess
from colocate.worker.serving.output import Tail
from colocate.worker.serving.service import CUT, GIVEN_BYTES, LOOK


class Teller(Protocol):
    """The keeper, as its workers see it."""

    def tell(self, message: Message) -> None:
        """Tell the driver something."""

    def forget(self, worker: StartedWorker, exit: tuple[Any, ...]) -> None:
        """A worker has ended."""

    def seen(self, worker: StartedWorker, number: int, what: bytes) -> None:
        """A worker has answered that question of what it does."""


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


NO_PROCESS = _NoProcess()


class StartedWorker:
    """One worker of a keeper, from the driver's command to its end."""

    def __init__(
        self, keeper: Teller, token: bytes, env: Mapping[str, str], name: str, imports: Sequence[str] | None = ()
    ) -> None:
        self.token = token
        self.name = name
        self.env = env
        self.imports = imports
        self.killed = False
        self.gone = False
        self.tail = Tail()
        self.door_process: DoorProcess | None = None
        self._keeper = keeper
        self.process: WorkerProcess = NO_PROCESS

    def kill(self, astray: bool = False) -> None:
        """End it; because it has closed its lane, or without a reason that would be told."""
        self.killed = True
        if self.process is NO_PROCESS:
            self.ended(None, None)
        elif astray:
            self.process.end_astray()
        else:
            self.process.kill()

    def look(self, number: int) -> None:
        """Answer the driver's question of this number: what is seen of it from outside."""
        if self.process is not NO_PROCESS:
            self.process.look(lambda what: self._keeper.tell(Inspected(self.token, number, what)))

    def look_inside(self, number: int) -> None:
        """Ask it what it does; it answers by itself."""
        if self.door_process is not None:
            self.door_process.look(number)

    def seen_inside(self, number: int, what: bytes) -> None:
        """It has answered."""
        self._keeper.seen(self, number, what)

    def cut(self) -> None:
        """The driver at the other end of its lane no longer commands. On the launching thread."""
        if self.door_process is not None:
            self.door_process.cut()

    def said(self, line: str) -> None:
        """A line of its output."""
        self.tail.append(line)
        self._keeper.tell(Said(self.token, line))

    def ended(self, exitcode: int | None, signal: str | None, detail: str | None = None) -> None:
        """It is gone."""
        self._report(exitcode, signal, detail)

    def failed(self, why: str) -> None:
        """There was no process to be started."""
        self._report(None, None, f"it could not be started: {why}")

    def _report(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        if not self.gone:
            self._keeper.tell(Ended(self.token, exitcode, signal, detail))
            self._keeper.forget(self, (exitcode, signal, detail))
            self.gone = True


class DoorProcess:
    """The process of a worker, to which lanes are handed through a door: one, or those of drivers that follow."""

    def __init__(
        self, hub: wire.Hub, env: Mapping[str, str], base: Mapping[str, str], label: str, imports: Sequence[str] | None
    ) -> None:
        self._hub = hub
        self._worker: StartedWorker | None = None
        self._ended: tuple[int | None, str | None, str | None] | None = None
        self._said: list[str] = []
        self._lock = threading.Lock()
        self.gone = threading.Event()
        self._process = WorkerProcess(hub, self)
        self._door, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process.start(env, theirs, base=base, waits=True, label=label, imports=imports)
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

    def give(self, worker: StartedWorker, lane: socket.socket, epoch: int, tls: wire.Tls | None, token: bytes) -> None:
        """Make it a worker. It may be given another lane later, if it is told an epoch."""
        self.pass_on(lane, epoch, tls, token)
        if not epoch:
            self._door.close()
        with self._lock:
            worker.process, worker.door_process = self._process, self
            self._worker, ended = worker, self._ended
        for line in self._said:
            worker.said(line)
        if ended is not None:  # it had ended already
            worker.ended(*ended)
        elif worker.killed:
            self._process.kill()
        elif epoch:
            with contextlib.suppress(ClosedError):  # just now
                self._hub.watch(self._door.fileno(), self._answered)

    def pass_on(self, lane: socket.socket, epoch: int, tls: wire.Tls | None, token: bytes) -> None:
        """Give it a lane: by its token it and the driver know each other, where they make TLS anew."""
        # When it has just died, its end is told as the worker's.
        with lane, contextlib.suppress(OSError):
            socket.send_fds(self._door, [b"%d " % epoch + wire.hand_on(lane, tls, token)], [lane.fileno()])

    def look(self, number: int) -> None:
        """Ask it what it does."""
        with contextlib.suppress(OSError):  # it has just died, or reads nothing
            self._door.send(LOOK + b"%d" % number, socket.MSG_DONTWAIT)

    def cut(self) -> None:
        """Have it let go of the lane that it has."""
        with contextlib.suppress(OSError):  # it has just died
            self._door.send(CUT)

    def drop(self) -> None:
        """It isn't needed."""
        self._process.kill()
        self._close_door()

    def reap(self) -> None:
        """End it in the place of the hub, which does nothing any more."""
        self._process.reap()

    # -- on the hub's thread

    def said(self, line: str) -> None:
        """A line of its output."""
        if self._worker is None:
            self._said.append(line)
        else:
            self._worker.said(line)

    def ended(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """It is gone."""
        with self._lock:
            self._ended = exitcode, signal, detail
            worker = self._worker
        if worker is not None:
            worker.ended(exitcode, signal, detail)
            self._close_door()
        self.gone.set()

    def _answered(self) -> None:
        """It says what it does."""
        try:
            answer = self._door.recv(GIVEN_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not answer:  # it has ended
            self._hub.unwatch(self._door.fileno())
        elif self._worker is not None:
            number, _, what = answer.partition(b" ")
            self._worker.seen_inside(int(number), what)

    def _close_door(self) -> None:
        if self._door.fileno() >= 0:
            self._hub.unwatch(self._door.fileno())
        self._door.close()
