"""The driver's record of one worker: what it has said of itself, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from colocate._definitions.lots import Receiver
from colocate.executor import Boot, Exit, Host
from colocate.worker.output import split_label

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup


_TAIL_LINES = 20


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
        group: The group it belongs to.
        slot: Its slot in the group.
        boot: What it was started with.
        host: The driver's end.
        hello: What it said of itself first: pid, Python, colocate.
        exit: How it ended; None while it runs.
        receiver: What it knows of the script.
    """

    group: ColocatedGroup
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
            executor = self.group.runtime.executor
            frame = executor.frame(head)
            self.host.send(frame)
            executor.discard(frame)

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        """A message from the worker."""
        kind = head[0]
        if kind == "done":
            _, seq, rows, start, end, size = head
            self.group.done(self.slot, seq, rows, start, end, size, body)
        else:
            _HANDLERS[kind](self, head, body)

    def logged(self, line: str) -> None:
        """A line of its output: shown with the role and rank that printed it, where that is known."""
        label, text = split_label(line)
        self._tail.append(text)
        who = f"{self.boot.group}/{label}" if label is not None else f"{self.boot.group} {self.slot}"
        self.group.runtime.printer.line(f"[{who}] {text}")

    def exited(self, exit: Exit) -> None:
        """It is gone."""
        tail = "\n".join(self._tail) or None
        self.exit = exit = attrs.evolve(exit, log_tail=exit.log_tail or tail)
        asking, self._asking = self._asking, []
        for tell in asking:
            tell(None)
        self.group.workforce.exited(self)

    def locate(self, then: Callable[[str | None], None]) -> None:
        """Find out where other workers reach it; None when it is gone."""
        with self.group.order.lock:
            if self._address is None and self.exit is None:
                self._asking.append(then)
                if len(self._asking) == 1:
                    self.send(("listen",))
                return
        then(self._address if self.exit is None else None)

    def _said_hello(self, head: tuple[Any, ...], body: Any) -> None:
        self.hello = head[1]
        self.group.workforce.said_hello(self)

    def _said_address(self, head: tuple[Any, ...], body: Any) -> None:
        with self.group.order.lock:
            self._address = head[1]
            asking, self._asking = self._asking, []
        for tell in asking:
            tell(self._address)

    def _failed(self, head: tuple[Any, ...], body: Any) -> None:
        if head[1] == 0:
            self.group.workforce.build_failed(self.slot, head[2], body)
        self.group.order.failed(self.slot, head[1], head[2], body)

    def _alive(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.order.alive(self.slot, head[1])

    def _held(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.order.held(self.slot, *head[1:])

    def _stacks(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.order.stacks(self.slot, *head[1:])

    def _can_withdraw(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.order.cancellations.answered(self.slot, *head[1:])

    def _fetched(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.residents.answered(self.slot, head, body)

    def _ask(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.questions.asked(self, *head[1:])

    def _define(self, head: tuple[Any, ...], body: Any) -> None:
        _, ids, names = head
        self.group.taught.told(self, ids, names, body)

    def _undefined(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.taught.lost(self, *head[1:])

    def _progress(self, head: tuple[Any, ...], body: Any) -> None:
        _, role, done, total = head
        self.progress[role] = done, total

    def _broken(self, head: tuple[Any, ...], body: Any) -> None:
        self.group.workforce.broken(self, head[1])

    def _closed(self, head: tuple[Any, ...], body: Any) -> None:
        self.lane_ended = True
        self.group.workforce.lane_ended(self)


_HANDLERS: dict[str, Callable[[Worker, tuple[Any, ...], Any], None]] = {
    "hello": Worker._said_hello,
    "address": Worker._said_address,
    "failed": Worker._failed,
    "alive": Worker._alive,
    "held": Worker._held,
    "stacks": Worker._stacks,
    "can_withdraw": Worker._can_withdraw,
    "fetched": Worker._fetched,
    "ask": Worker._ask,
    "define": Worker._define,
    "undefined": Worker._undefined,
    "progress": Worker._progress,
    "broken": Worker._broken,
    "closed": Worker._closed,
}
