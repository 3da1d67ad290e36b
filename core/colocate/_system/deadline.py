"""`Deadline`: one moment for all that waits below whoever has set it."""

from __future__ import annotations

import math
import time


class Deadline:
    """A moment until which something is waited for. It is handed down, so that waits one after the other share it.

    Attributes:
        at: When it is, by `time.monotonic()`; `math.inf` when it never comes.
    """

    __slots__ = ("at",)

    def __init__(self, seconds: float | None = None) -> None:
        self.at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until it, never below zero; None for ever: as what waits takes it."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.at != math.inf and time.monotonic() >= self.at

    def at_most(self, seconds: float) -> float:
        """Seconds until it, or so many, whichever is less: for who looks around meanwhile."""
        return seconds if (left := self.left) is None else min(left, seconds)

    def before(self, seconds: float) -> Deadline:
        """Return the moment so many seconds before it."""
        earlier = Deadline()
        earlier.at = self.at - seconds
        return earlier

    def or_sooner(self, other: Deadline) -> Deadline:
        """Whichever of the two is first."""
        return other if other.at < self.at else self


NEVER = Deadline()
