"""`StopSignals`: a run is told to stop, and comes to a checkpoint first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import attrs


@attrs.define(eq=False)
class StopSignals:
    """While entered: a first Ctrl-C or SIGTERM is only noted, a second one raises KeyboardInterrupt(its number)."""

    _noticed: Callable[[str], None]
    received: str | None = None  # the first signal's name
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
        if self.received is not None:
            raise KeyboardInterrupt(number)
        self.received = signal.Signals(number).name
        self._noticed(self.received)
