"""The local executor with a thread of the driver for each slot.

A breakpoint works, values aren't copied, and a start takes milliseconds.
"""

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
from colocate.worker.serving.service import create_hello
from colocate_local.machine import Machine

_GIVEN_UP = "a thread, which can't be killed: it was given up, and still runs"


class LocalThreads(Machine):
    """An executor with one thread per slot.

    A hung thread can't be ended. The thread's slot is freed, and the thread isn't used again.
    """

    in_process = True

    def __init__(self, node: Node, strict: bool) -> None:
        super().__init__(node)
        self.codec = STRICT if strict else BY_REFERENCE
        self._hosts: dict[tuple[str, int], ThreadHost] = {}

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker on a new thread."""
        host = ThreadHost(self, boot, events)
        self._hosts[boot.group, boot.slot] = host
        try:
            host.send_hello()
        except BaseException:  # A signal handler may have raised the error.
            host.kill()
            raise
        return host

    def frame(self, head: tuple[Any, ...], body: Any = None) -> Any:
        """Return the message unencoded, because head and body are passed by reference."""
        return head, body

    def numbered(self, message: Any, body: Any) -> tuple[Any, Sequence[Callable[[int], object]]]:
        """Return the message unencoded, with functions that set each call's sequence number."""
        return (message, body), [partial(setattr, call, "seq") for call in message.numbered]

    def discard(self, frame: Any) -> None:
        """Do nothing, because a message of this executor holds no resources to free."""

    def find_host(self, group: str, slot: int) -> WorkerHost:
        """Return the worker on a slot of a group.

        Raises:
            ColocateError: The worker is gone.
        """
        host = self._hosts.get((group, slot))
        if host is None:
            raise ColocateError(f"worker {slot} of group {group!r} is gone")
        return host.worker

    def remove_host(self, boot: Boot) -> None:
        """Remove an ended worker from the table of workers."""
        self._hosts.pop((boot.group, boot.slot), None)

    def _list_workers(self) -> list[Running]:
        """List the lane threads of this process, including hung threads of abandoned workers."""
        living = {host.boot.worker for host in list(self._hosts.values())}
        names = [thread.name.removeprefix(LANE) for thread in threading.enumerate() if thread.name.startswith(LANE)]
        return [
            Running("worker", name, node=self._node.name, pid=os.getpid(), detail="" if name in living else _GIVEN_UP)
            for name in names
            if self._is_ours(name)
        ]

    def close(self) -> None:
        """Do nothing, because this executor has no open connections."""


class ThreadHost(Host):
    """The driver's handle of a worker that runs on a thread of this process."""

    def __init__(self, executor: LocalThreads, boot: Boot, events: HostEvents) -> None:
        self.boot = boot
        self._executor = executor
        self._events = events
        self._lock = threading.Lock()
        self._has_ended = False
        self.worker = WorkerHost(
            boot,
            executor.codec,
            self._send_to_driver,
            lambda host: LocalPeers(host, executor.find_host),
            in_process=True,
            on_end=lambda: self._on_exit(None),
        )

    def send_hello(self) -> None:
        """Report the worker's hello message to the driver."""
        self._send_to_driver(create_hello(), None)

    def _send_to_driver(self, head: tuple[Any, ...], body: Any) -> None:
        if not self._has_ended:
            self._events.received(head, body)

    def send(self, frame: Any) -> None:
        """Pass a message to the worker, unless the worker has ended."""
        if not self._has_ended:
            self.worker.receive(*frame)

    def kill(self) -> None:
        """Free the slot and ignore later messages from the worker. The thread itself can't be killed."""
        self._on_exit("ended with its group; a thread can't be killed and may still run")
        for part in list(self.worker.parts.values()):
            part.kill()
        self.worker.close("the worker was ended")

    def _on_exit(self, detail: str | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._executor.remove_host(self.boot)
        self._events.exited(Exit(detail=detail))
