"""Slots as threads of the driver: a breakpoint works, nothing is copied, start-up takes milliseconds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from colocate.errors import ColocateError
from colocate.executor import BY_REFERENCE, STRICT, Boot, Exit, Host, HostEvents, Node, Place, Running
from colocate.worker.residents.peers import LocalPeers
from colocate.worker.serving.host import LANE, WorkerHost
from colocate.worker.serving.service import hello
from colocate_local.machine import Machine

_GIVEN_UP = "a thread, which can't be killed: it was given up, and still runs"


class LocalThreads(Machine):
    """One thread per slot. A hung thread can't be ended: its slot is freed, and the thread is never used again."""

    in_process = True

    def __init__(self, node: Node, strict: bool) -> None:
        super().__init__(node)
        self.codec = STRICT if strict else BY_REFERENCE
        self._hosts: dict[tuple[str, int], ThreadHost] = {}

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker as a thread."""
        host = ThreadHost(self, boot, events)
        self._hosts[boot.group, boot.slot] = host
        try:
            host.start()
        except BaseException:  # for example, a signal handler has raised
            host.kill()
            raise
        return host

    def frame(self, head: tuple[Any, ...], body: Any = None) -> Any:
        """Return the message unencoded: head and body are passed by reference."""
        return head, body

    def numbered(self, message: Any, body: Any) -> tuple[Any, Sequence[Callable[[int], object]]]:
        """Return the message unencoded, and a setter of the sequence number for each call."""
        return (message, body), [partial(setattr, call, "seq") for call in message.numbered]

    def discard(self, frame: Any) -> None:
        """Do nothing: a frame holds no resources here."""

    def find(self, group: str, slot: int) -> WorkerHost:
        """Return the worker on a slot of a group; raise `ColocateError` if the worker is gone."""
        host = self._hosts.get((group, slot))
        if host is None:
            raise ColocateError(f"worker {slot} of group {group!r} is gone")
        return host.worker

    def forget(self, boot: Boot) -> None:
        """Remove an ended worker."""
        self._hosts.pop((boot.group, boot.slot), None)

    def _workers(self) -> list[Running]:
        """List the lane threads of this process, including hung threads of abandoned workers."""
        living = {host.boot.worker for host in list(self._hosts.values())}
        names = [thread.name.removeprefix(LANE) for thread in threading.enumerate() if thread.name.startswith(LANE)]
        return [
            Running("worker", name, node=self._node.name, pid=os.getpid(), detail="" if name in living else _GIVEN_UP)
            for name in names
            if self._is_ours(name)
        ]

    def close(self) -> None:
        """Do nothing: no connection is open."""


class ThreadHost(Host):
    """The driver's end of a worker in the same process."""

    def __init__(self, executor: LocalThreads, boot: Boot, events: HostEvents) -> None:
        self.boot = boot
        self._executor = executor
        self._events = events
        self._lock = threading.Lock()
        self._over = False
        self.worker = WorkerHost(
            boot,
            executor.codec,
            self._say,
            lambda host: LocalPeers(host, executor.find),
            in_process=True,
            on_end=lambda: self._exit(None),
        )

    def start(self) -> None:
        """Report the worker's hello to the driver."""
        self._say(hello(), None)

    def _say(self, head: tuple[Any, ...], body: Any) -> None:
        if not self._over:
            self._events.received(head, body)

    def send(self, frame: Any) -> None:
        """Pass a message to the worker, unless the worker has ended."""
        if not self._over:
            self.worker.receive(*frame)

    def kill(self) -> None:
        """Free the slot and ignore later messages from the worker: a thread can't be killed."""
        self._exit("ended with its group; a thread can't be killed and may still run")
        for part in list(self.worker.parts.values()):
            part.kill()
        self.worker.close("the worker was ended")

    def _exit(self, detail: str | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._executor.forget(self.boot)
        self._events.exited(Exit(detail=detail))
