"""The local executor with a process for each slot. A socket pair connects driver and process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from colocate import wire
from colocate.executor import Boot, Exit, Host, HostEvents, Node, OwnProcess, Place, Running
from colocate.gpus import torch_device, visibility_variables
from colocate.keeper import AFTER_LANE_S, Launcher, WorkerProcess, first_message, forks, list_children, list_leftovers
from colocate_local.machine import Machine


class LocalProcesses(Machine, OwnProcess):
    """An executor with one process per slot. The workers end with the driver, even if the driver is killed."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.event_loop = wire.EventLoop("local", on_death=self._on_hub_ended)
        self._launcher = Launcher()
        for thread in (self._launcher, self.event_loop):
            # The threads start here, so that a failure to start a thread reaches the caller of `connect`.
            thread.start()
        forks.hold_template(os.environ)
        self.hosts: dict[str, ProcessHost] = {}

    @staticmethod
    def _device_name(devices: tuple[int, ...]) -> str:
        return torch_device(0 if devices else None)  # A worker sees only the devices of one slot, numbered from 0.

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker in a new process."""
        env = {**boot.env, **visibility_variables(self._gpus, place.devices)}
        host = ProcessHost(self, boot, events)
        self.hosts[boot.worker] = host
        try:
            self._launcher.run(lambda: host.start_process(env))
        except BaseException:  # The start has failed, or Ctrl-C has interrupted the wait.
            self._launcher.call_soon(host.abandon_start)
            raise
        return host

    def _list_workers(self) -> list[Running]:
        """List the worker processes below this process, including processes without an entry in `hosts`."""
        workers_by_pid = {host.pid: worker for worker, host in list(self.hosts.items())}
        children = [(workers_by_pid.get(child.supervisor_pid, child.label), child) for child in list_children()]
        running = [
            Running("worker", worker, node=self._node.name, pid=child.pid, since=child.since)
            for worker, child in children
            if self._is_ours(worker)
        ]
        leftovers = [
            leftover for leftover in list_leftovers(os.getpid()) if not leftover.label or self._is_ours(leftover.label)
        ]
        return running + [leftover.to_running(self._node.name) for leftover in leftovers]

    def _on_hub_ended(self, reason: str) -> None:
        """Report all workers as lost, because the event loop has ended and no message can arrive."""
        for host in list(self.hosts.values()):
            host.on_hub_lost(reason)

    def close(self) -> None:
        """End the remaining workers, then the threads that serve the workers."""
        forks.release_template()
        for host in list(self.hosts.values()):
            host.kill()
        self.event_loop.close()
        self._launcher.close()


class ProcessHost(Host):
    """The driver's handle of a worker process, with the connection, the output and the exit."""

    def __init__(self, executor: LocalProcesses, boot: Boot, events: HostEvents) -> None:
        self.boot = boot
        self.on_line = events.logged
        self._executor = executor
        self._events = events
        self._process = WorkerProcess(executor.event_loop, self)
        self._reason: str | None = None

    def start_process(self, env: dict[str, str]) -> None:
        """Start the process with this process's environment, changed by `env`. Runs on the launching thread."""
        ours, theirs = socket.socketpair()
        try:
            self.lane = self._executor.event_loop.attach(ours, self._events.received, self._on_lane_closed)
            with theirs:
                env = {**os.environ, **env}
                self._process.start(env, theirs, label=self.boot.worker, imports=self.boot.imports)
        except BaseException:
            if self.lane is not None:
                self.lane.close()
            ours.close()
            raise
        self.pid = self._process.pid
        self.lane.send(*first_message(self.boot))

    def abandon_start(self) -> None:
        """Kill the process of a failed or interrupted start. Runs on the launching thread."""
        if not self._process.pid:
            self._executor.hosts.pop(self.boot.worker, None)
        self.kill()

    def send(self, frame: Any) -> None:
        """Send a message to the worker process."""
        if self.lane is not None:
            self.lane.send(frame)

    def kill(self) -> None:
        """Kill the process without waiting for the exit."""
        self._process.kill()

    def inspect(self, then: Callable[[str | None], None]) -> None:
        """Call `then` with the worker's current activity, read from the memory of the worker's process."""
        self._process.inspect(then)

    # -- on the event loop's thread

    def _on_lane_closed(self, reason: str) -> None:
        # A worker without a connection is useless. After this delay a worker that hasn't exited is killed.
        self._executor.event_loop.call_later(AFTER_LANE_S, self._process.end_stray)

    def on_exit(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Handle the end of the process: close the connection and report the exit."""
        if self.lane is not None:
            self.lane.finish("the worker has ended")
        self._executor.hosts.pop(self.boot.worker, None)
        self._events.exited(Exit(exitcode, signal, self._reason or detail))

    def on_hub_lost(self, reason: str) -> None:
        """Kill and reap the process, because the driver can't receive messages from the worker any more."""
        self._reason = reason
        self._process.reap()
