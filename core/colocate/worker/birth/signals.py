"""Ignores signals that a terminal or batch system sends to all processes. Only the driver responds.

Some ask a program to end (SIGINT, SIGTERM, SIGHUP), others to write a checkpoint (SIGUSR1, SIGUSR2, SIGXCPU).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

_ENDING = signal.SIGINT, signal.SIGTERM  # A process also sends these signals to end forks.
FOR_DRIVERS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
LEFT = *_ENDING, *FOR_DRIVERS
ASKS = signal.SIGRTMIN + 1
"""Asks a process that ignores SIGTERM to end. No batch system or terminal sends this signal."""


def pass_over(numbers: Iterable[int]) -> None:
    """Ignore these signals, until other code sets a handler.

    An empty handler is set, not SIG_IGN, because an ignored signal stays ignored in programs that roles start.
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

    Forks of this process also ignore these signals, except for signals that end a fork.
    """
    pass_over(LEFT)

    # The signals are blocked during a fork until handlers are reset, because an earlier signal would be lost.
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
