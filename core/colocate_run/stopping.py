"""`StopSignals`: how a run is asked to end.

SIGTERM asks, however often it comes: schedulers send it several times (Slurm at a preemption twice within a moment),
and have SIGKILL for what won't end. A second Ctrl-C, which somebody at a terminal has pressed, ends it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import attrs


class Asked(KeyboardInterrupt):
    """A wish to end that came while no job looked at it; its argument is the signal's number."""


@attrs.define(eq=False)
class StopSignals:
    """While entered, what a SIGTERM or Ctrl-C does is a matter of what the run does.

    As long as no job looks at `run.stopping` (it starts, or a lost group is made anew), the first one gives that up, by
    `Asked`. In a job it is only noted. When the job is over, SIGTERM has come too late, and Ctrl-C ends it at once.

    Attributes:
        then: What is done besides when a job notes it.
        received: The first signal's name; None as long as nobody has asked.
        count: How many have come since then.
        during: What the run does.
    """

    _noticed: Callable[[str], None]
    then: Callable[[], object] = attrs.field(default=lambda: None, init=False)
    received: str | None = None
    count: int = attrs.field(default=0, init=False)
    during: Literal["no job", "a job", "the end"] = attrs.field(default="no job", init=False)
    _interrupted: bool = attrs.field(default=False, init=False)
    _previous: dict[int, Any] = attrs.field(factory=dict, init=False)

    def __enter__(self) -> StopSignals:
        # Python lets the main thread alone set handlers; a job run elsewhere is stopped by whoever runs it.
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
                raise Asked(number)
            self._noticed(self.received)
            self.then()
        else:
            self.count += 1
            if number == signal.SIGINT and (again or self.during == "the end"):
                raise KeyboardInterrupt(number)
