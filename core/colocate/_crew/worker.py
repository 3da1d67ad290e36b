"""The driver's record of one worker: what it has said of itself, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from colocate._calls.services import Services
from colocate._definitions.bundles import Table
from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Request, Requests
from colocate._signals.at_work import Section
from colocate.errors import EngineError
from colocate.executor import Boot, Exit, Host
from colocate.worker.serving.output import Tail, split_label


class WorkerEvents(Protocol):
    """Who is told what a worker says, and how it ends. On the thread that hears messages."""

    def said_hello(self, worker: Worker) -> None:
        """It runs."""

    def done(self, slot: int, done: from_worker.Done, body: Any) -> None:
        """A rank has finished a call."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """It has said anything else that isn't about itself."""

    def broken(self, worker: Worker, reason: str) -> None:
        """It is of no use any more."""

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
        table: What it knows of the script.
    """

    events: WorkerEvents
    services: Services
    lock: Section
    slot: int
    boot: Boot
    host: Host = NOT_LAUNCHED
    hello: Mapping[str, Any] | None = None
    exit: Exit | None = None
    lane_ended: bool = False
    table: Table = attrs.field(factory=lambda: Table("is given it"))
    progress: dict[str | None, tuple[float, float | None]] = attrs.field(factory=dict)
    _tail: Tail = attrs.field(factory=Tail)
    _questions: Requests[int, str | None] = attrs.field(factory=Requests[int, "str | None"])
    _where: Request[int, str | None] | None = None

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

    def send(self, message: Message) -> None:
        """Send a message of its own to this worker."""
        if self.exit is None:
            executor = self.services.executor
            frame = executor.frame(message.head())
            self.host.send(frame)
            executor.discard(frame)

    def received(self, head: Head, body: Any) -> None:
        """A message from the worker."""
        message = read(head)
        if isinstance(message, from_worker.Done):
            self.events.done(self.slot, message, body)
        elif (own := _OWN.get(type(message))) is not None:
            own(self, message)
        else:
            self.events.heard(self, message, body)

    def logged(self, line: str) -> None:
        """A line of its output: shown with the role and rank that printed it, where that is known."""
        label, text = split_label(line)
        self._tail.append(text)
        text = text.removesuffix("\r")
        who = f"{self.boot.group}/{label}" if label is not None else f"{self.boot.group} {self.slot}"
        self.services.printer.line(f"[{who}] {text}")

    def exited(self, exit: Exit) -> None:
        """It is gone."""
        tail = "\n".join(self._tail).removesuffix("\r") or None
        self.exit = exit = attrs.evolve(exit, log_tail=exit.log_tail or tail)
        self._questions.fail_all(EngineError("the worker has ended"))
        self.events.exited(self)

    def locate(self, then: Callable[[str | None, str], None]) -> None:
        """Find out where other workers reach it; if they don't: None, and why."""
        with self.lock:
            asked = self._where
            if asked is None:
                asked = self._where = self._questions.open([self.slot])
                self.send(to_worker.Listen())

        def answered() -> None:
            if asked.error is not None:
                then(None, str(asked.error))
            else:
                then(asked.answers.get(self.slot) if self.exit is None else None, "it is gone")

        asked.then(answered)

    def _said_hello(self, hello: from_worker.Hello) -> None:
        self.hello = hello.facts
        self.events.said_hello(self)

    def _said_address(self, found: from_worker.Address) -> None:
        assert self._where is not None
        asked = self._where
        if found.trouble:
            with self.lock:
                self._where = None  # who asks next may be luckier
            self._questions.refused(asked.token, EngineError(found.trouble))
        else:
            self._questions.answered(asked.token, self.slot, found.address)

    def _progress(self, progress: from_worker.Progress) -> None:
        self.progress[progress.role] = progress.done, progress.total

    def _broken(self, message: from_worker.Broken) -> None:
        self.events.broken(self, message.reason)

    def _closed(self, message: from_worker.Closed) -> None:
        self.lane_ended = True
        self.events.lane_ended(self)


_OWN: dict[type[Message], Callable[[Worker, Any], None]] = {
    from_worker.Hello: Worker._said_hello,
    from_worker.Address: Worker._said_address,
    from_worker.Progress: Worker._progress,
    from_worker.Broken: Worker._broken,
    from_worker.Closed: Worker._closed,
}
