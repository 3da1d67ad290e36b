"""`Scope` decides which of a worker's calls may wait, and ends the waits of all other calls.

When a call has failed on another rank, the group ends, or a driver releases the worker, the values that later calls
await may never come. Waits of those calls end at once, and no new waits begin. A failed call of one lane doesn't affect
the calls of other lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colocate._protocol.consequence import LET_GO

Ender: TypeAlias = Callable[[Callable[[int], bool], str], object]
"""Ends waits of calls whose numbers satisfy a predicate, with a reason. On any thread; must not block."""


class Scope:
    """Knows which calls may wait, by call number. The receiving thread changes it, and all threads read it.

    Attributes:
        base: Last call number of former drivers; the construction of roles (0) isn't one of their calls.
        closed: The reason for the worker's end; None while the worker runs.
        lane_of: Returns the background role whose lane runs a call; "" for the main lane.
    """

    def __init__(self, lane_of: Callable[[int], str] = lambda seq: "") -> None:
        """Start without restrictions, so that all calls may wait."""
        self.base = 0
        self.closed: str | None = None
        self.lane_of = lane_of
        self._ended: dict[str, tuple[int, str]] = {}  # by lane
        self._enders: list[Ender] = []

    def add_ender(self, ender: Ender) -> None:
        """Register a callback that ends waits. A wait that begins later must check `get_wait_refusal` first."""
        self._enders.append(ender)

    def get_wait_refusal(self, seq: int | None) -> str | None:
        """Return the reason why a call mustn't wait; None for a call that may.

        Args:
            seq: The call's number; None for a wait outside of calls.
        """
        if seq is not None and self.is_of_former_driver(seq):
            return LET_GO
        if self.closed is not None or not self._ended:
            return self.closed
        ended = self._ended.get("" if seq is None else self.lane_of(seq))
        return ended[1] if ended is not None and (seq is None or seq >= ended[0]) else None

    def is_of_former_driver(self, number: int) -> bool:
        """Return whether a call or resident belongs to a former driver."""
        return 0 < number <= self.base

    def end_waits(self, seq: int, reason: str, lane: str = "") -> None:
        """End the waits of a lane's calls from number `seq` on, until `resume_waits`."""
        self._ended[lane] = seq, reason
        self._run_enders(lambda each: each >= seq and self.lane_of(each) == lane, reason)

    def resume_waits(self, lane: str = "") -> None:
        """Allow a lane's calls to wait again, unless the worker is closing."""
        self._ended.pop(lane, None)

    def forget_driver(self, base: int) -> None:
        """End all waits for a former driver. The next driver's calls and residents have numbers above `base`."""
        self.base = base
        self._ended.clear()
        self._run_enders(lambda each: True, LET_GO)

    def close(self, reason: str) -> None:
        """End all waits, because the worker is closing."""
        self.closed = reason
        self._run_enders(lambda each: True, reason)

    def _run_enders(self, concerns: Callable[[int], bool], reason: str) -> None:
        for ender in self._enders:
            ender(concerns, reason)
