"""What ranks are doing: each is asked, and one that doesn't answer soon is looked at from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import attrs

from colocate._jobs import JobThread
from colocate._link import Link

WITHIN_S = 0.5
_SILENT_AFTER_S = 0.1  # then a rank is looked at from outside; it may still answer

NO_ANSWER = "no answer (C code may hold the GIL, or it is stopped)"
"""What stands where a rank's stack would, if neither the rank nor its machine tells it."""


@attrs.frozen
class Stacks:
    """What ranks were doing when they were asked.

    Attributes:
        told: By slot, of those that have answered.
        seen: By slot, of those that had given no answer and were looked at from outside, where that can be.
    """

    told: dict[int, str] = attrs.field(factory=dict)
    seen: dict[int, str] = attrs.field(factory=dict)

    def of(self, slot: int) -> str:
        """What is known of a rank."""
        return self.told.get(slot) or self.seen.get(slot) or NO_ANSWER


@attrs.frozen(eq=False)
class _Question:
    """Ranks that have been asked, who still owes an answer, and whom it is for."""

    waiting: set[int]
    then: Callable[[Stacks], None]
    found: Stacks = attrs.field(factory=Stacks)


class StackQuestions:
    """Those to the ranks of one group.

    Attributes:
        ran: The calls that each rank ran when it last told its stack.
    """

    def __init__(self, link: Link, timers: JobThread, lock: threading.RLock) -> None:
        self.ran: dict[int, tuple[int, ...]] = {}
        self._link, self._timers, self._lock = link, timers, lock
        self._asked: dict[int, _Question] = {}
        self._token = link.base

    def ask(self, slots: list[int], then: Callable[[Stacks], None]) -> None:
        """Ask some ranks; the answer comes on the timers' thread, in a bounded time."""
        with self._lock:
            live = set(self._link.live())
            asked = [slot for slot in slots if slot in live]
            self._token += 1
            token = self._token
            if not asked:
                self._timers.soon(lambda: then(Stacks()))
                return
            self._asked[token] = _Question(set(asked), then)
            self._timers.after(_SILENT_AFTER_S, lambda: self._look_at_silent(token))
            self._timers.after(WITHIN_S, lambda: self._stop_asking(token))
            self._link.send(asked, ("stack", token))

    def answered(self, slot: int, token: int, text: str, running: tuple[int, ...]) -> None:
        """A rank has said what it is doing."""
        with self._lock:
            self.ran[slot] = running
            asked = self._asked.get(token)
            if asked is None:
                return
            asked.found.told[slot] = text
            asked.waiting.discard(slot)
            if not asked.waiting:
                del self._asked[token]
                self._timers.soon(lambda: asked.then(asked.found))

    def renew(self) -> None:
        """Begin anew with other workers. The lock is held."""
        self._asked.clear()
        self.ran.clear()

    def _look_at_silent(self, token: int) -> None:
        with self._lock:
            asked = self._asked.get(token)
            silent = list(asked.waiting) if asked is not None else []
        for slot in silent:
            self._link.look(slot, partial(self._seen, token, slot))

    def _seen(self, token: int, slot: int, what: str | None) -> None:
        with self._lock:
            asked = self._asked.get(token)
            if asked is not None and what is not None:
                asked.found.seen[slot] = what

    def _stop_asking(self, token: int) -> None:
        with self._lock:
            asked = self._asked.pop(token, None)
        if asked is not None:
            asked.then(asked.found)
