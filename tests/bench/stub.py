"""An executor without workers: its hosts answer at once, on the caller's thread, so that only the driver works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Message, decode_head
from colocate.executor import Boot, Executor, Exit, Host, HostEvents, Node, Place, Request, Reservation, Running
from colocate.worker.serving.service import create_hello


class StubExecutor(Executor):
    name = "stub"

    def __init__(self) -> None:
        self._running: dict[str, StubHost] = {}

    def nodes(self) -> Sequence[Node]:
        return [Node("stub")]

    def reserve(self, request: Request) -> Reservation:
        return Reservation((Place("stub"),) * request.slots)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        host = self._running[boot.worker] = StubHost(self, boot, events)
        events.received(create_hello(), None)
        return host

    def frame(self, head: tuple[Any, ...], body: Any = None) -> Any:
        return head, super().frame(head, body)

    def numbered(self, message: Any, body: Any) -> Any:
        """Frame a numbered message; the stub gets the number, too."""
        found, puts = super().numbered(message, body)
        return (message, found), [partial(_both, *each) for each in zip(message.numbered, puts, strict=True)]

    def discard(self, frame: Any) -> None:
        super().discard(frame[1])

    def release(self, reservation: Reservation) -> None:
        """There is nothing to free."""

    def running(self) -> Sequence[Running]:
        return [Running("worker", name) for name in self._running]

    def close(self) -> None:
        """There is nothing to disconnect."""

    def ended(self, boot: Boot) -> None:
        del self._running[boot.worker]


def _both(call: Any, put: Callable[[int], object], number: int) -> None:
    call.seq = number
    put(number)


class StubHost(Host):
    """A worker that has handled a message when `send` returns."""

    def __init__(self, executor: StubExecutor, boot: Boot, events: HostEvents) -> None:
        self._executor = executor
        self._boot = boot
        self._events = events
        self._alive = True

    def send(self, frame: Any) -> None:
        message, now = decode_head(frame[0]), time.time()
        if isinstance(message, to_worker.Build):
            self._say(from_worker.CallEnded(0, None, now, now, None))
        elif isinstance(message, to_worker.Call):
            # The bytes and rows of this rank's part of a kept call.
            size = (0, 1) if message.keep is not None else None
            self._say(from_worker.CallEnded(message.seq, None, now, now, size))
        elif isinstance(message, to_worker.Close):
            self._say(from_worker.LaneClosed())
            self.kill()

    def _say(self, message: Message) -> None:
        self._events.received(message.head(), None)

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            self._executor.ended(self._boot)
            self._events.exited(Exit(0))
