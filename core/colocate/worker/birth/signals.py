"""Ignores signals that a terminal or batch system sends to all processes. Only the driver responds.

Some ask a program to end (SIGINT, SIGTERM, SIGHUP), others to write a checkpoint (SIGUSR1, SIGUSR2, SIGXCPU).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

_ENDING = signal.SIGINT, signal.SIGTERM  # Programs also send these signals to end their own forks.
FOR_DRIVERS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
IGNORED = *_ENDING, *FOR_DRIVERS
END_REQUEST = signal.SIGRTMIN + 1
"""Asks a process that ignores SIGTERM to end. No batch system or terminal sends this signal."""


def ignore_signals(numbers: Iterable[int]) -> None:
    """Ignore these signals, until other code sets a handler.

    An empty handler is set, not SIG_IGN, because an ignored signal stays ignored in programs that roles start.
    """
    for number in numbers:
        signal.signal(number, _ignore_signal)


def _ignore_signal(number: int, frame: object) -> None:
    return


def install_end_handler() -> None:
    """Handle `END_REQUEST` like SIGTERM: by the handler that role code has set, otherwise by the default action."""

    def ask(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(END_REQUEST, ask)


def ignore_driver_signals() -> None:
    """Ignore signals that are meant for drivers. Called in workers, and in children that run a function.

    Forks of this process also ignore these signals, except for signals that end a fork.
    """
    ignore_signals(IGNORED)

    # The signals are blocked from the fork until the fork has reset the handlers. Otherwise, a signal would be lost.
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def restore() -> None:
        for number in _ENDING:
            if signal.getsignal(number) is _ignore_signal:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
