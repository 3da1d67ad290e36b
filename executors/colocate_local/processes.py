"""Slots as processes of this machine, each on a socket pair: the way to use all its GPUs without a cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from colocate import wire
from colocate.executor import Boot, Exit, Host, HostEvents, Node, OwnProcess, Place
from colocate_local.local import Local

_TAIL_LINES = 20
_LINE_BYTES = 8192  # a line without an end (a progress bar's) is shown by pieces


class LocalProcesses(Local, OwnProcess):
    """One spawned process per slot. They end with the driver, even when it is killed."""

    def __init__(self, node: Node, strict: bool) -> None:
        """Use `Local.connect`."""
        super().__init__(node, strict)
        self._hub = wire.Hub("local")
        self._launcher = Launcher()
        self._hosts: dict[str, ProcessHost] = {}

    @staticmethod
    def _device(devices: tuple[int, ...]) -> str:
        return "cuda:0" if devices else "cpu"  # the worker sees its own devices only

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker as a process."""
        env = {**os.environ, **boot.env}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if place.devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
        host = ProcessHost(self._hub, boot, events, self._forget)
        self._hosts[boot.worker] = host
        try:
            self._launcher.run(lambda: host.start(env, self._strict))
        except BaseException:  # it couldn't be started, or Ctrl-C came while it was
            self._launcher.soon(host.give_up)
            raise
        return host

    def _forget(self, host: ProcessHost) -> None:
        self._hosts.pop(host.boot.worker, None)

    def running(self) -> Sequence[str]:
        """The ids of the workers."""
        return list(self._hosts)

    def close(self) -> None:
        """End the threads that serve the workers."""
        self._hub.close()
        self._launcher.close()


class Launcher:
    """A thread that starts processes. The kernel ties their lives to it, so it lives as long as the executor."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="colocate-launcher", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on the thread, and wait for it."""
        done = threading.Event()
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                job()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.soon(guarded)
        done.wait()
        if errors:
            raise errors[0]

    def soon(self, job: Callable[[], None]) -> None:
        """Run a job on the thread after those before it."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class ProcessHost(Host):
    """The driver's end of a worker process: its lane, its output, its end."""

    def __init__(self, hub: wire.Hub, boot: Boot, events: HostEvents, forget: Callable[[ProcessHost], None]) -> None:
        self.boot = boot
        self._hub = hub
        self._events = events
        self._forget = forget
        self._process: subprocess.Popen[bytes] | None = None
        self._lane: wire.SocketLane | None = None
        self._pidfd = -1
        self._pidfd_lock = threading.Lock()  # a descriptor that is closed may be another process's at once
        self._log = -1
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = b""

    def start(self, env: dict[str, str], strict: bool) -> None:
        """Start the process, on the launching thread."""
        ours, theirs = socket.socketpair()
        self._log, output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "colocate.worker", str(theirs.fileno()), str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            os.close(self._log)
            raise
        finally:
            theirs.close()
            os.close(output)
        self.pid = self._process.pid
        os.set_blocking(self._log, False)
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._lane = self._hub.attach(ours, self._events.received, self._lane_closed)
        except BaseException:  # no descriptor is left, or the executor is closed
            ours.close()
            self._process.kill()
            self._process.wait()
            self._close_descriptors()
            raise
        self._hub.watch(self._log, self._read_log)
        self._hub.watch(self._pidfd, self._ended)
        self._lane.send(("boot", strict), wire.pack(self.boot))

    def give_up(self) -> None:
        """End what a start that failed, or that nobody has waited for, may have left. On the launching thread."""
        if self._pidfd < 0:
            self._forget(self)
        self.kill()

    def send(self, frame: Any) -> None:
        """Send a message."""
        if self._lane is not None:
            self._lane.send(frame)

    def kill(self) -> None:
        """End the process now."""
        with self._pidfd_lock, contextlib.suppress(OSError):  # it is gone already
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # -- on the hub's thread

    def _lane_closed(self, reason: str) -> None:
        # A worker without its lane is of no use: it leaves by itself, or is made to.
        if self._process is not None and self._process.returncode is None:
            self.kill()

    def _read_log(self) -> None:
        try:
            data = os.read(self._log, 65536)
        except BlockingIOError:
            return
        if not data:
            self._hub.unwatch(self._log)
            return
        *lines, rest = (self._partial + data).split(b"\n")
        while len(rest) > _LINE_BYTES:
            lines.append(rest[:_LINE_BYTES])
            rest = rest[_LINE_BYTES:]
        self._partial = rest
        for line in lines:
            self._show(line)

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._tail.append(text)
        with contextlib.suppress(OSError, ValueError):  # the driver's own output is closed: nobody reads it
            print(f"[{self.boot.group} {self.boot.slot}] {text}", file=sys.stderr, flush=True)

    def _ended(self) -> None:
        process, lane = self._process, self._lane
        assert process is not None
        assert lane is not None
        code = process.wait()
        self._hub.unwatch(self._pidfd)
        lane.finish("the worker has ended")
        self._drain_log()
        self._close_descriptors()
        self._forget(self)
        name = signal.Signals(-code).name if code < 0 else None
        self._events.exited(Exit(None if code < 0 else code, name, log_tail="\n".join(self._tail) or None))

    def _close_descriptors(self) -> None:
        with self._pidfd_lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1
        os.close(self._log)

    def _drain_log(self) -> None:
        try:
            while data := os.read(self._log, 65536):
                self._partial += data
        except BlockingIOError:  # a child of the worker still has the pipe
            pass
        self._hub.unwatch(self._log)
        for line in self._partial.splitlines():
            self._show(line)
