"""Waiting for what comes asynchronously: for a condition, for a bounded time."""

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
"""How long a test waits for what must come: nobody measures it, it only has to end."""

_STEP_S = 0.005


def becomes_true(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Whether a condition is met within a time."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(_STEP_S)
    return True


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, and fail if it isn't met in time."""
    assert becomes_true(condition), f"it never came to this: {what}"


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process; one that is told to stop has stopped when this returns, on a busy machine too."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        process = psutil.Process(pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"process {pid} has stopped")


def starter_of(worker: int) -> int:
    """The process that has started a worker, of which its supervisors lie below; alive."""
    starter = int(psutil.Process(worker).environ()[MARK].partition(" ")[0])
    assert starter in {parent.pid for parent in psutil.Process(worker).parents()}
    return starter


class Processes:
    """Processes by pid, held so that their ends can be waited for whatever becomes of the pids."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def wait(self) -> None:
        """Wait until all of them are gone, and fail if they don't go."""
        for pid, descriptor in self._descriptors.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000), f"process {pid} is still there"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of them."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
