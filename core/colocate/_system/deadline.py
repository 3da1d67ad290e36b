"""Share one deadline among several waits (`Deadline`)."""

from __future__ import annotations

import math
import time


class Deadline:
    """A time limit that is passed to several consecutive waits, so that all end by the same time.

    Attributes:
        at: The time of the end, by `time.monotonic()`; `math.inf` for no deadline.
    """

    __slots__ = ("at",)

    def __init__(self, seconds: float | None = None) -> None:
        self.at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, never negative; None for no deadline, as waiting functions expect."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.at != math.inf and time.monotonic() >= self.at

    def limit_wait(self, seconds: float) -> float:
        """Return the smaller of `seconds` and the seconds left, as the timeout of one polling step."""
        return seconds if (seconds_left := self.seconds_left) is None else min(seconds_left, seconds)

    def move_earlier(self, seconds: float) -> Deadline:
        """Return a deadline that is earlier by the given seconds."""
        earlier = Deadline()
        earlier.at = self.at - seconds
        return earlier

    def get_earlier(self, other: Deadline) -> Deadline:
        return other if other.at < self.at else self


NEVER = Deadline()
