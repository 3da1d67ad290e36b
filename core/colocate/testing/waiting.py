"""Helpers for tests that wait, with a time limit, for a condition or for the end of processes."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

import psutil

from colocate.worker.birth.supervisor import MARK

PATIENCE_S = 60.0
"""The seconds that a test waits for an event that must happen. The exact value doesn't matter."""

_STEP_S = 0.005


def becomes_true(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Wait up to `within_s` seconds, and return whether a condition has become true."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(_STEP_S)
    return True


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition is true, and fail the test if this takes too long."""
    assert becomes_true(condition), f"it never came to this: {what}"


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process. After SIGSTOP, wait until the process has stopped."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        process = psutil.Process(pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"process {pid} has stopped")


def find_starter(worker: int) -> int:
    """Return the pid of the running process that has started a worker and the worker's supervisors."""
    starter = int(psutil.Process(worker).environ()[MARK].partition(" ")[0])
    assert starter in {parent.pid for parent in psutil.Process(worker).parents()}
    return starter


class Processes:
    """A set of processes whose ends a test can wait for, even if the pids are reused."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def wait_all(self) -> None:
        """Wait until all processes have ended, and fail the test if this takes too long."""
        for pid, descriptor in self._descriptors.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000), f"process {pid} is still there"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_all()

    def release_all(self) -> None:
        """Close the file descriptors of the processes."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
