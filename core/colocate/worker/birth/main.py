"""Runs a worker process: `python -m colocate.worker FD PARENT_PID serves|waits LABEL`.

FD is the worker's end of the lane, or with `waits` a socket on which that end will come. LABEL names the owner in
process listings of the machine. The worker ends with its lane (in a pool that may be detached, when its keeper says
so), and so with its driver. Its supervisors kill it when the launching thread ends, even while role code holds the GIL.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from colocate import wire
from colocate._system.jobs import report_exception
from colocate._system.libc import merge_at_once
from colocate._system.recent import RecentSpans
from colocate._system.room import read_private_bytes
from colocate._system.threads import Thread
from colocate._values.codec import BY_VALUE
from colocate.executor import Boot
from colocate.features import breakpoint_feature, list_followers
from colocate.worker.birth.first_imports import call_on_import
from colocate.worker.birth.template import reset_after_fork
from colocate.worker.residents.peers import ChannelPeers
from colocate.worker.serving.host import WorkerHost
from colocate.worker.serving.output import apply_log_levels, label_output
from colocate.worker.serving.service import Service, receive_lane
from colocate.worker.serving.signal_handlers import end_guard, guard_handlers

SPAWNED = "colocate.worker.birth.spawned"
"""Name of `__main__` for multiprocessing in processes that roles spawn."""


def main() -> None:
    """Set up this worker process, and serve drivers until the worker ends."""
    fd = int(sys.argv[1])
    reset_after_fork()
    label_output()
    faulthandler.enable()
    merge_at_once()
    # multiprocessing imports a spawned process's `__main__` by this name.
    sys.modules["__main__"].__spec__.name = SPAWNED  # type: ignore[union-attr]
    os.set_inheritable(fd, False)  # A program that a role starts or execs mustn't hold the driver's connection open.
    sock = socket.socket(fileno=fd)
    if sys.argv[3] != "waits":
        serve(sock)
        return
    door = sock  # Through this socket, the keeper passes connections to drivers, with this machine's certificates.
    try:
        handover = receive_lane(door)
    except EOFError:  # Without a driver, a worker has nothing to do.
        os._exit(0)
    assert not isinstance(handover, bytes)
    sock, epoch, tls = handover
    if epoch:
        serve(sock, tls, epoch, wire.track_socket(door))
    else:
        door.close()
        serve(sock, tls)


def serve(sock: socket.socket, tls: wire.Tls | None = None, epoch: int = 0, door: socket.socket | None = None) -> None:
    """Run a worker on a connected, authenticated socket. The first message there must be the boot message.

    The calling thread, which must be the main thread, becomes the lane.
    """
    event_loop = wire.EventLoop("worker", own_thread=False)
    hosts: queue.SimpleQueue[WorkerHost] = queue.SimpleQueue()
    end_event = threading.Event()

    def begin(boot: Boot, service: Service, lane: wire.SocketLane) -> WorkerHost:
        host = start_host(boot, service, lane, end_event.set)
        hosts.put(host)
        return host

    def receive() -> None:
        try:
            event_loop.run()
        except BaseException:  # Nobody controls this worker any more, but role code would continue.
            report_exception()
            os._exit(1)

    Service(event_loop, begin, tls, door).open(sock, epoch)
    Thread(target=receive, name="colocate-worker").start()
    lane = hosts.get().lane
    _raise_thread_counts()  # Called on this thread, because OpenMP has a count for each thread.
    guard_handlers(lane)
    lane.run()
    end_guard()
    end_event.wait()


def start_host(boot: Boot, service: Service, lane: wire.SocketLane, on_end: Callable[[], object]) -> WorkerHost:
    """Set up the process for a boot message, and create the worker host. Runs on the event loop's thread."""
    os.environ.update(boot.env)
    wire.set_default_cut(boot.cut_s)
    # Otherwise, a library that looks for Ray would start a Ray cluster in each worker.
    if "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    interface: str | None = "lo"
    if boot.host != wire.LOOPBACK:  # By itself, torch may choose an interface that other machines can't reach.
        import psutil

        addresses = ((name, item.address) for name, entries in psutil.net_if_addrs().items() for item in entries)
        interface = next((name for name, address in addresses if address == boot.host), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if boot.host != wire.LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    sys.path.extend(entry for entry in boot.path if entry not in sys.path)
    if boot.cpus is not None and "OMP_NUM_THREADS" not in boot.env:
        # Torch and other libraries read the variable at the first import.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(boot.cpus)))
    apply_log_levels(boot.log_levels)

    def end() -> None:
        service.drain(1.0)
        service.event_loop.close()
        turns.close()
        on_end()

    def look_at_numbers() -> None:
        if (wide := host.setting.process_state) is not None:
            wide.on_library_imported()

    def look_at_torch() -> None:
        if not host.roles:  # The baseline is the process's memory without roles.
            host.baseline_bytes = read_private_bytes()
        for name in list_followers():
            host.get_feature(name).on_module_imported()
        look_at_numbers()

    turns = wire.Turns(lane)
    peers = partial(ChannelPeers, tls=service.tls)
    host = WorkerHost(boot, BY_VALUE, service.send_message, peers, on_end=end, turns=turns)
    host.baseline_bytes = read_private_bytes()
    call_on_import({"torch": look_at_torch, "numpy.random": look_at_numbers})
    host.definitions.install()
    if (feature := breakpoint_feature()) is not None:
        process = os.getpid()

        def stop(*args: Any, **kwargs: Any) -> object:
            if os.getpid() != process:
                raise RuntimeError("breakpoint() in a process that a role has forked: it has no way to a terminal")
            return host.get_feature(feature).breakpoint(sys._getframe(1), args, kwargs)()

        sys.breakpointhook = stop
    if service.door is not None:
        host.recent = RecentSpans()
    return host


_OPENBLAS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")]


def _raise_thread_counts() -> None:
    """Set the thread counts of torch and OpenBLAS from the environment, or to their own defaults.

    In a fork of the template, torch and NumPy may have been imported before these variables were set.
    """
    if sys.modules.keys().isdisjoint({"numpy", "torch"}):  # Only these modules load OpenBLAS.
        return

    def first_number(*names: str) -> int:
        digits = (os.environ.get(name, "").split(",")[0].strip() for name in names)
        return next((int(text) for text in digits if text.isdigit() and int(text)), 0)

    count = first_number("OMP_NUM_THREADS")
    # Without a count, torch has already counted the processors at import.
    if count and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
    count = first_number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    with open("/proc/self/maps") as file:
        libraries = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
    for path in libraries:
        for name in _OPENBLAS if "openblas" in os.path.basename(path) else ():
            if (setter := getattr(ctypes.CDLL(path), name, None)) is not None:
                setter(count or len(os.sched_getaffinity(0)))
