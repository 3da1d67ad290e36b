"""`Scope`: which of a worker's calls may wait, and why the others mustn't. What ends a wait in a worker ends it here.

A call that has failed on another rank, the end of the group and a driver that lets go all mean the same to those who
wait: from some call on, what they wait for may never be. Waits of those calls end now, and later ones don't begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colocate._protocol.consequence import LET_GO

End: TypeAlias = Callable[[int, str], object]
"""Ends waits of calls from a number on, -1 for all, with a reason. On any thread; it doesn't block."""


class Scope:
    """Calls by their numbers. Changed by the thread that receives messages, asked by all.

    Attributes:
        base: Calls up to this, but for the construction of roles (0), are of a driver that has let go.
        closed: Why the worker ends; None while it doesn't.
    """

    def __init__(self) -> None:
        """Begin with all of them allowed to wait."""
        self.base = 0
        self.closed: str | None = None
        self._ended: tuple[int, str] | None = None
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
        ended = self._ended
        return ended[1] if ended is not None and (seq is None or seq >= ended[0]) else None

    def let_go(self, number: int) -> bool:
        """Whether a call or resident is of a driver that has let go."""
        return 0 < number <= self.base

    def end(self, seq: int, reason: str) -> None:
        """Calls from `seq` on wait no longer, until `resume`."""
        self._ended = seq, reason
        self._tell(seq, reason)

    def resume(self) -> None:
        """Calls may wait again, unless the worker ends."""
        if self.closed is None:
            self._ended = None

    def renew(self, base: int) -> None:
        """A driver has let go; the numbers of the next one's calls and residents are above `base`."""
        self.base, self._ended = base, None
        self._tell(-1, LET_GO)

    def close(self, reason: str) -> None:
        """The worker ends: nothing waits any more."""
        self.closed = reason
        self.end(-1, reason)

    def _tell(self, seq: int, reason: str) -> None:
        for ender in self._enders:
            ender(seq, reason)
