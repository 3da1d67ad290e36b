"""A worker process: `python -m colocate.worker FD PARENT_PID serves|waits LABEL`.

The descriptor is its end of the lane, or with `waits` a socket on which that comes later; the label, which is for
whoever looks at the processes of this machine, says whose it is. The worker lives as long as
its driver and whoever started it: it ends when the lane does, and the kernel kills it when the launching thread ends,
even while role code holds the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import socket
import sys
from functools import partial
from typing import Any

from colocate import wire
from colocate._codec import BY_VALUE
from colocate._parent import die_with
from colocate.executor import Boot
from colocate.worker.guard import start_guard
from colocate.worker.host import WorkerHost
from colocate.worker.output import label_output
from colocate.worker.peers import ChannelPeers

GIVEN_BYTES = 1 << 20


def main() -> None:
    """Serve one lane until it is closed."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    _leave_signals_to_the_driver()
    label_output()
    faulthandler.enable()
    start_guard()
    sock = socket.socket(fileno=fd)
    if sys.argv[3] == "waits":
        serve(*_given(sock))
    else:
        serve(sock)


def _given(door: socket.socket) -> tuple[socket.socket, wire.Tls | None]:
    """Wait for the lane and the certificates of this machine; without a lane there is nothing to do."""
    with door:
        data, fds, _, _ = socket.recv_fds(door, GIVEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        os._exit(0)
    if data == wire.NO_TLS:
        return socket.socket(fileno=fds[0]), None
    import json

    tls = json.loads(data)
    return socket.socket(fileno=fds[0]), wire.Tls(**tls)


def _leave_signals_to_the_driver() -> None:
    """A terminal or a batch system signals all processes at once; the driver decides what becomes of the workers.

    By handlers, not by ignoring: an ignored signal stays ignored in the programs that roles start.
    """

    def passed_over(number: int, frame: object) -> None:
        return

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, passed_over)

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is passed_over:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def serve(sock: socket.socket, tls: wire.Tls | None = None) -> None:
    """Be the worker at the other end of a connected, authenticated socket; the first message is the boot."""
    hub = wire.Hub("worker", own_thread=False)
    state: dict[str, WorkerHost] = {}

    def received(head: tuple[Any, ...], body: Any) -> None:
        if head[0] == "boot":
            state["host"] = start(wire.unpack(body), lane, hub, tls)
        else:
            state["host"].receive(head, body)

    def closed(reason: str) -> None:
        # Without the driver nothing here has an owner; role code that still runs must not keep the process.
        if "host" not in state or not state["host"].ended:
            os._exit(0)

    lane = hub.attach(sock, received, closed)
    hub.run()


def start(boot: Boot, lane: wire.SocketLane, hub: wire.Hub, tls: wire.Tls | None) -> WorkerHost:
    """Set the process up as the boot says, and start the host."""
    os.environ.update(boot.env)
    if (interface := _interface(boot.host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if boot.host != wire.LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    sys.path.extend(entry for entry in boot.path if entry not in sys.path)
    if boot.cpus is not None and "OMP_NUM_THREADS" not in boot.env:
        # torch and its libraries read this when they are first imported, which is after now.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(boot.cpus)))

    def leave() -> None:
        lane.drain(1.0)
        hub.close()
        turns.close()

    turns = wire.Turns(lane)
    host = WorkerHost(boot, BY_VALUE, partial(_say, lane), partial(ChannelPeers, tls=tls), on_end=leave, turns=turns)
    lane.send(("hello", hello()))
    return host


def _interface(host: str) -> str | None:
    """The network interface that has an address; left to itself torch may choose one that others don't reach."""
    if host == wire.LOOPBACK:
        return "lo"
    import psutil

    found = (name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == host)
    return next(found, None)


def _say(lane: wire.SocketLane, head: tuple[Any, ...], body: Any) -> None:
    lane.send(head, body)


def hello() -> dict[str, Any]:
    """What a worker says of itself first."""
    import colocate

    return {
        "pid": os.getpid(),
        "python": platform.python_version().rpartition(".")[0],
        "colocate": colocate.__version__,
    }
