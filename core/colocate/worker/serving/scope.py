"""`Scope`: decides which of a worker's calls may wait, and ends all waits of the others, with a reason.

A call that has failed on another rank, the group's end, and a driver that releases the worker mean the same for
waiting calls: from some call on, the awaited values may never come. Waits of those calls end now, and later ones don't
begin. A failed call of one lane doesn't matter to the calls of another lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colocate._protocol.consequence import LET_GO

End: TypeAlias = Callable[[Callable[[int], bool], str], object]
"""Ends waits of calls whose numbers satisfy a predicate, with a reason. On any thread; must not block."""


class Scope:
    """Calls that may wait, by number. Changed by the receiving thread, read by all.

    Attributes:
        base: Last call number of former drivers; the construction of roles (0) isn't one of their calls.
        closed: The reason of the worker's end; None while it goes on.
        lane_of: Returns the background role whose lane runs a call; "" for the main lane.
    """

    def __init__(self, lane_of: Callable[[int], str] = lambda seq: "") -> None:
        """Allow all calls to wait."""
        self.base = 0
        self.closed: str | None = None
        self.lane_of = lane_of
        self._ended: dict[str, tuple[int, str]] = {}  # by lane
        self._enders: list[End] = []

    def ends(self, ender: End) -> None:
        """Register a callback for the end of waits. Later waits must check `why` first."""
        self._enders.append(ender)

    def why(self, seq: int | None) -> str | None:
        """Return the reason why a call mustn't wait; None for a call that may.

        Args:
            seq: The call's number; None for a wait outside of calls.
        """
        if seq is not None and self.let_go(seq):
            return LET_GO
        if self.closed is not None or not self._ended:
            return self.closed
        ended = self._ended.get("" if seq is None else self.lane_of(seq))
        return ended[1] if ended is not None and (seq is None or seq >= ended[0]) else None

    def let_go(self, number: int) -> bool:
        """Return whether a call or resident belongs to a former driver."""
        return 0 < number <= self.base

    def end(self, seq: int, reason: str, lane: str = "") -> None:
        """End waits of a lane's calls from `seq` on, until `resume`."""
        self._ended[lane] = seq, reason
        self._tell(lambda each: each >= seq and self.lane_of(each) == lane, reason)

    def resume(self, lane: str = "") -> None:
        """Allow a lane's calls to wait again, unless the worker ends."""
        self._ended.pop(lane, None)

    def renew(self, base: int) -> None:
        """End waits for a former driver; numbers of the next driver's calls and residents are above `base`."""
        self.base = base
        self._ended.clear()
        self._tell(lambda each: True, LET_GO)

    def close(self, reason: str) -> None:
        """End all waits at the worker's end."""
        self.closed = reason
        self._tell(lambda each: True, reason)

    def _tell(self, concerns: Callable[[int], bool], reason: str) -> None:
        for ender in self._enders:
            ender(concerns, reason)
