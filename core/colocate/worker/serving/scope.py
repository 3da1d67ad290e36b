"""`Scope`: which of a worker's calls may wait, and why the others mustn't. What ends a wait in a worker ends it here.

A call that has failed on another rank, the end of the group and a driver that lets go all mean the same to those who
wait: from some call on, what they wait for may never be. Waits of those calls end now, and later ones don't begin.
A call of one lane that has failed is nothing to the calls of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colocate._protocol.consequence import LET_GO

End: TypeAlias = Callable[[Callable[[int], bool], str], object]
"""Ends waits of the calls that a function names by their numbers, with a reason. On any thread; it doesn't block."""


class Scope:
    """Calls by their numbers. Changed by the thread that receives messages, asked by all.

    Attributes:
        base: Calls up to this, but for the construction of roles (0), are of a driver that has let go.
        closed: Why the worker ends; None while it doesn't.
        lane_of: Says of which role's own lane a call that runs is; "" where it is of the main one.
    """

    def __init__(self, lane_of: Callable[[int], str] = lambda seq: "") -> None:
        """Begin with all of them allowed to wait."""
        self.base = 0
        self.closed: str | None = None
        self.lane_of = lane_of
        self._ended: dict[str, tuple[int, str]] = {}  # by lane
        self._enders: list[End] = []

    def ends(self, ender: End) -> None:
        """Have something called when waits are over. What begins to wait after that asks `why` itself."""
        self._enders.append(ender)

    def why(self, seq: int | None) -> str | None:
        """Why a call mustn't wait; None when it may.

        Args:
            seq: Its number; None for who waits without any.
        """
        if seq is not None and self.let_go(seq):
            return LET_GO
        if self.closed is not None or not self._ended:
            return self.closed
        ended = self._ended.get("" if seq is None else self.lane_of(seq))
        return ended[1] if ended is not None and (seq is None or seq >= ended[0]) else None

    def let_go(self, number: int) -> bool:
        """Whether a call or resident is of a driver that has let go."""
        return 0 < number <= self.base

    def end(self, seq: int, reason: str, lane: str = "") -> None:
        """Calls of a lane from `seq` on wait no longer, until `resume`."""
        self._ended[lane] = seq, reason
        self._tell(lambda each: each >= seq and self.lane_of(each) == lane, reason)

    def resume(self, lane: str = "") -> None:
        """Calls of a lane may wait again, unless the worker ends."""
        self._ended.pop(lane, None)

    def renew(self, base: int) -> None:
        """A driver has let go; the numbers of the next one's calls and residents are above `base`."""
        self.base = base
        self._ended.clear()
        self._tell(lambda each: True, LET_GO)

    def close(self, reason: str) -> None:
        """The worker ends: nothing waits any more."""
        self.closed = reason
        self._tell(lambda each: True, reason)

    def _tell(self, concerns: Callable[[int], bool], reason: str) -> None:
        for ender in self._enders:
            ender(concerns, reason)
