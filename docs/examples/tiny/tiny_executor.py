"""An executor without keepers: each worker is a process of this machine, on a socket pair."""

import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import colocate
from colocate import wire
from colocate.executor import (
    Boot,
    Executor,
    Exit,
    Host,
    HostEvents,
    Node,
    OwnProcess,
    Place,
    Request,
    Reservation,
    Running,
)
from colocate.gpus import names, visibility_variables
from colocate.keeper import Launcher, WorkerProcess, first_message
from colocate.placement import Ledger


@colocate.hookimpl
def colocate_executor() -> type[Executor]:
    return Tiny


class Tiny(Executor, OwnProcess):
    """Workers are processes of this machine, each on a socket pair."""

    name = "tiny"

    def __init__(self, *, cpus: float | None = None, gpus: int = 0) -> None:
        """What it offers. These are also its options in a config."""
        self._node = Node(platform.node(), cpus, gpus)
        # A worker sees its own GPUs only, so its first one is always cuda:0.
        self._ledger = Ledger([self._node], lambda devices: "cuda:0" if devices else "cpu")
        self._gpus = names(gpus)  # as CUDA_VISIBLE_DEVICES names them, which may show this process some of them only
        self._event_loop = wire.EventLoop("tiny", on_death=self._hub_ended)
        self._launcher = Launcher()  # a thread that stays: the kernel kills a worker when the one that started it ends
        self._hosts: dict[str, Process] = {}

    def nodes(self) -> Sequence[Node]:
        return [self._node]

    def reserve(self, request: Request) -> Reservation:
        return self._ledger.reserve(request)

    def withdraw(self, request: Request) -> None:
        self._ledger.withdraw(request)

    def release(self, reservation: Reservation) -> None:
        self._ledger.release(reservation)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        host = Process(self._event_loop, boot, events, self._hosts.pop)
        self._launcher.run(lambda: host.start(visibility_variables(self._gpus, place.devices)))
        self._hosts[boot.worker] = host
        return host

    def running(self) -> Sequence[Running]:
        workers = [Running("worker", worker, pid=host.pid) for worker, host in self._hosts.items()]
        return [*self._ledger.running(), *workers]

    def _hub_ended(self, reason: str) -> None:  # by an exception: nothing of the workers would be heard any more
        for host in list(self._hosts.values()):
            host.lost(reason)

    def close(self) -> None:
        self._event_loop.close()
        self._launcher.close()


class Process(Host):
    """The driver's end of one worker."""

    def __init__(
        self, event_loop: wire.EventLoop, boot: Boot, events: HostEvents, forget: Callable[[str, None], Any]
    ) -> None:
        self._event_loop, self._boot, self._events, self._forget = event_loop, boot, events, forget
        self._process = WorkerProcess(event_loop, self)  # it calls `on_line` and `on_exit`
        self._reason: str | None = None

    def start(self, visible: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process.start({**os.environ, **self._boot.env, **visible}, theirs)
        self.pid = self._process.pid
        self._lane = self._event_loop.attach(ours, self._events.received, self._lane_closed)
        self._lane.send(*first_message(self._boot))  # what the worker must know before anything is imported

    def send(self, frame: Any) -> None:
        self._lane.send(frame)

    def kill(self) -> None:
        self._process.kill()

    def inspect(self, then: Callable[[str | None], None]) -> None:
        self._process.inspect(then)  # what it does, seen from outside

    def _lane_closed(self, reason: str) -> None:
        self.kill()  # a worker without a lane is of no use

    def on_line(self, line: str) -> None:
        self._events.logged(line)

    def on_exit(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        self._lane.finish("the worker has ended")  # what it had still sent comes before `exited`
        self._forget(self._boot.worker, None)
        self._events.exited(Exit(exitcode, signal, self._reason or detail))

    def lost(self, reason: str) -> None:
        self._reason = reason
        self._process.reap()  # and `on_exit` follows
