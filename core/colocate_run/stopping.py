"""Handle stop signals of a run (`StopSignals`).

SIGTERM asks for an end, however often it comes, because schedulers send several (Slurm sends two at a preemption), and
use SIGKILL for processes that don't end. A second Ctrl-C comes from a user at a terminal, and ends the run at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import attrs


class StopRequest(KeyboardInterrupt):
    """Raised by a stop signal outside of the job; the argument is the signal's number."""


@attrs.define(eq=False)
class StopSignals:
    """A context manager that handles SIGTERM and Ctrl-C.

    Before the job begins, or during a restart, the first signal raises `StopRequest`. During the job the signal is only
    recorded. After the job, SIGTERM is too late, and Ctrl-C ends the run at once.

    Attributes:
        on_stop: Called after a signal was recorded during a job.
        received: The first signal's name; None before.
        count: The number of signals so far.
        during: The present part of the run.
    """

    _on_notice: Callable[[str], None]
    on_stop: Callable[[], object] = attrs.field(default=lambda: None, init=False)
    received: str | None = None
    count: int = attrs.field(default=0, init=False)
    during: Literal["no job", "a job", "the end"] = attrs.field(default="no job", init=False)
    _interrupted: bool = attrs.field(default=False, init=False)
    _previous: dict[int, Any] = attrs.field(factory=dict, init=False)

    def __enter__(self) -> StopSignals:
        # Python allows signal handlers only on the main thread. On another thread, the caller must stop the job.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._interrupted = self._interrupted, self._interrupted or number == signal.SIGINT
        if self.received is None and self.during != "the end":
            self.received, self.count = signal.Signals(number).name, 1
            if self.during == "no job":
                self.during = "the end"
                raise StopRequest(number)
            self._on_notice(self.received)
            self.on_stop()
        else:
            self.count += 1
            if number == signal.SIGINT and (again or self.during == "the end"):
                raise KeyboardInterrupt(number)
