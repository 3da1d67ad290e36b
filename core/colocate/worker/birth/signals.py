"""Signals that a terminal or a batch system sends to all processes at once: the driver decides what becomes of workers.

Some ask a program to end (SIGINT, SIGTERM, SIGHUP), others to write a checkpoint (SIGUSR1, SIGUSR2, SIGXCPU).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

_ENDING = signal.SIGINT, signal.SIGTERM  # by these whoever has forked a process ends it
FOR_DRIVERS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
LEFT = *_ENDING, *FOR_DRIVERS
ASKS = signal.SIGRTMIN + 1
"""Asks what passes over SIGTERM to end. No batch system or terminal sends this one."""


def pass_over(numbers: Iterable[int]) -> None:
    """Do nothing when these signals come, until somebody sets a handler of his own.

    By handlers, not by ignoring: an ignored signal stays ignored in the programs that roles start.
    """
    for number in numbers:
        signal.signal(number, _passed_over)


def _passed_over(number: int, frame: object) -> None:
    return


def end_when_asked() -> None:
    """Do at `ASKS` what SIGTERM does in a process that passes over none, or what this one's own handler of it does."""

    def ask(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGTERM) is _passed_over:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(ASKS, ask)


def leave_to_the_driver() -> None:
    """Have this process pass over them: a worker, or a function that is its child.

    Its forks do so, too, but for those by which they are ended.
    """
    pass_over(LEFT)

    # What comes to a fork before the handlers are gone there would be passed over: it waits, until they are.
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
