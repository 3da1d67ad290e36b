"""Signals that a terminal or a batch system sends to all processes at once: workers leave the response to the driver.

Some ask a program to end (SIGINT, SIGTERM, SIGHUP), others to write a checkpoint (SIGUSR1, SIGUSR2, SIGXCPU).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

_ENDING = signal.SIGINT, signal.SIGTERM  # sent by a process to end a fork of its own
FOR_DRIVERS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
LEFT = *_ENDING, *FOR_DRIVERS
ASKS = signal.SIGRTMIN + 1
"""Asks a process that ignores SIGTERM to end. No batch system or terminal sends this signal."""


def pass_over(numbers: Iterable[int]) -> None:
    """Ignore these signals, until other code sets a handler.

    The handler does nothing, instead of SIG_IGN: an ignored signal stays ignored in programs that roles start.
    """
    for number in numbers:
        signal.signal(number, _passed_over)


def _passed_over(number: int, frame: object) -> None:
    return


def end_when_asked() -> None:
    """Handle `ASKS` like SIGTERM: by the handler that role code has set, otherwise by the default action."""

    def ask(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGTERM) is _passed_over:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(ASKS, ask)


def leave_to_the_driver() -> None:
    """Ignore the signals for drivers in this process: a worker, or a child that runs a function.

    Its forks ignore them, too, except for the signals that end a fork.
    """
    pass_over(LEFT)

    # A fork blocks the signals until the handlers are reset: a signal before that would be ignored.
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def restore() -> None:
        for number in _ENDING:
            if signal.getsignal(number) is _passed_over:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
