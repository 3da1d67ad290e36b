"""The driver's record of one worker: what it has said of itself, and how it ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from colocate._definitions.lots import Receiver
from colocate._services import Services
from colocate.executor import Boot, Exit, Host
from colocate.worker.output import split_label

_TAIL_LINES = 20


class WorkerEvents(Protocol):
    """Who is told what a worker says, and how it ends. On the thread that hears messages."""

    def said_hello(self, worker: Worker) -> None:
        """It runs."""

    def done(self, slot: int, seq: int, rows: int | None, start: float, end: float, size: Any, body: Any) -> None:
        """A rank has finished a call."""

    def heard(self, worker: Worker, head: tuple[Any, ...], body: Any) -> None:
        """It has said anything else that isn't about itself."""

    def broken(self, worker: Worker, reason: str) -> None:
        """A thread that it needs has ended."""

    def lane_ended(self, worker: Worker) -> None:
        """It runs role code no longer, and is about to leave."""

    def exited(self, worker: Worker) -> None:
        """It is gone."""


class _NotLaunched(Host):
    """Stands where a host will be: nothing hears what is sent to it."""

    def send(self, frame: Any) -> None:
        """Nobody is there yet."""

    def kill(self) -> None:
        """Nobody is there yet."""


NOT_LAUNCHED = _NotLaunched()


@attrs.define(eq=False)
class Worker:
    """One worker of a group. It hears what its host says (`HostEvents`) and passes it on.

    Attributes:
        events: Who is told what it says.
        services: Those of its runtime.
        lock: That of its group's calls.
        slot: Its slot in the group.
        boot: What it was started with.
        host: The driver's end.
        hello: What it said of itself first: pid, Python, colocate.
        exit: How it ended; None while it runs.
        receiver: What it knows of the script.
    """

    events: WorkerEvents
    services: Services
    lock: threading.RLock
    slot: int
    boot: Boot
    host: Host = NOT_LAUNCHED
    hello: dict[str, Any] | None = None
    exit: Exit | None = None
    lane_ended: bool = False
    receiver: Receiver = attrs.field(factory=lambda: Receiver("is given it"))
    progress: dict[str | None, tuple[int, int | None]] = attrs.field(factory=dict)
    _tail: deque[str] = attrs.field(factory=lambda: deque(maxlen=_TAIL_LINES))
    _address: str | None = None
    _asking: list[Callable[[str | None], None]] = attrs.field(factory=list)

    @property
    def pid(self) -> int | None:
        """Its process id, where it is known."""
        if self.hello is not None:
            pid: int = self.hello["pid"]
            return pid
        return self.host.pid

    @property
    def state(self) -> str:
        """What the graph shows."""
        if self.exit is not None:
            return "exited"
        return "running" if self.hello is not None else "starting"

    def send(self, head: tuple[Any, ...]) -> None:
        """Send a message of its own to this worker."""
        if self.exit is None:
            executor = self.services.executor
            frame = executor.frame(head)
            self.host.send(frame)
            executor.discard(frame)

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        """A message from the worker."""
        kind = head[0]
        if kind == "done":
            _, seq, rows, start, end, size = head
            self.events.done(self.slot, seq, rows, start, end, size, body)
        elif (own := _OWN.get(kind)) is not None:
            own(self, head)
        else:
            self.events.heard(self, head, body)

    def logged(self, line: str) -> None:
        """A line of its output: shown with the role and rank that printed it, where that is known."""
        label, text = split_label(line)
        self._tail.append(text)
        who = f"{self.boot.group}/{label}" if label is not None else f"{self.boot.group} {self.slot}"
        self.services.printer.line(f"[{who}] {text}")

    def exited(self, exit: Exit) -> None:
        """It is gone."""
        tail = "\n".join(self._tail) or None
        self.exit = exit = attrs.evolve(exit, log_tail=exit.log_tail or tail)
        asking, self._asking = self._asking, []
        for tell in asking:
            tell(None)
        self.events.exited(self)

    def locate(self, then: Callable[[str | None], None]) -> None:
        """Find out where other workers reach it; None when it is gone."""
        with self.lock:
            if self._address is None and self.exit is None:
                self._asking.append(then)
                if len(self._asking) == 1:
                    self.send(("listen",))
                return
        then(self._address if self.exit is None else None)

    def _said_hello(self, head: tuple[Any, ...]) -> None:
        self.hello = head[1]
        self.events.said_hello(self)

    def _said_address(self, head: tuple[Any, ...]) -> None:
        with self.lock:
            self._address = head[1]
            asking, self._asking = self._asking, []
        for tell in asking:
            tell(self._address)

    def _progress(self, head: tuple[Any, ...]) -> None:
        _, role, done, total = head
        self.progress[role] = done, total

    def _broken(self, head: tuple[Any, ...]) -> None:
        self.events.broken(self, head[1])

    def _closed(self, head: tuple[Any, ...]) -> None:
        self.lane_ended = True
        self.events.lane_ended(self)


_OWN: dict[str, Callable[[Worker, tuple[Any, ...]], None]] = {
    "hello": Worker._said_hello,
    "address": Worker._said_address,
    "progress": Worker._progress,
    "broken": Worker._broken,
    "closed": Worker._closed,
}
