"""How far the workers of a group have come, for whoever waits for all of them."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from colocate._system.deadline import Deadline


class Stage(enum.IntEnum):
    """What a worker does. It goes on from one to a later one only, perhaps not through all of them."""

    STARTING = 0
    """Nothing has been heard of it."""
    RUNNING = 1
    """It has said hello."""
    BUILT = 2
    """Its roles are constructed, or one of them could not be."""
    LEAVING = 3
    """It runs role code no longer, and leaves by itself."""
    GONE = 4
    """Its process has ended, or none was started."""


class Stages:
    """Those of the workers on some slots. Who waits is woken by the last one, however many there are."""

    def __init__(self, slots: int) -> None:
        """Args: slots: How many."""
        self._news = threading.Condition()
        self._of = [Stage.STARTING] * slots
        self._in = [slots] + [0] * (len(Stage) - 1)  # how many are in each

    def reach(self, slot: int, stage: Stage) -> None:
        """A worker has come so far; nothing new if it has come farther."""
        with self._news:
            before = self._of[slot]
            if stage > before:
                self._of[slot] = stage
                self._in[stage] += 1
                self._in[before] -= 1
                if not self._in[before]:
                    self._news.notify_all()

    def all_reached(self, stage: Stage) -> bool:
        """Whether all have come so far."""
        return not any(self._in[:stage])

    def short_of(self, stage: Stage) -> set[int]:
        """The slots whose workers haven't come so far."""
        with self._news:
            return {slot for slot, reached in enumerate(self._of) if reached < stage}

    def any_in(self, stage: Stage) -> bool:
        """Whether some worker is just there."""
        return bool(self._in[stage])

    def wake(self) -> None:
        """Something else has come that somebody may wait for."""
        with self._news:
            self._news.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until something is so; whether it is."""
        with self._news:
            return self._news.wait_for(ready, deadline.left)
