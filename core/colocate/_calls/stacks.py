"""What ranks are doing: each is asked, and one that doesn't answer soon is looked at from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from colocate._calls.pending import Link
from colocate._protocol.from_worker import Stack
from colocate._protocol.requests import Request, Requests
from colocate._protocol.to_worker import AskStack
from colocate._signals.in_framework import Section
from colocate._system.jobs import JobThread
from colocate._system.limits import SILENT_AFTER_S, STACKS_WITHIN_S

NO_ANSWER = "no answer (C code may hold the GIL, or it is stopped)"
"""What stands where a rank's stack would, if neither the rank nor its machine tells it."""
HAS_LEFT = "running nothing; its lane has ended"
"""Likewise, if it has left, or is about to: as its worker says it, while it still answers."""


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
        """Return what is known of a rank."""
        return self.told.get(slot) or self.seen.get(slot) or NO_ANSWER


class StackQuestions:
    """The questions for stacks to the ranks of one group.

    Attributes:
        ran: The calls that each rank ran when it last told its stack.
    """

    def __init__(self, link: Link, timers: JobThread, lock: Section) -> None:
        self.ran: dict[int, tuple[int, ...]] = {}
        self._link, self._timers, self._lock = link, timers, lock
        self._requests: Requests[int, str] = Requests(link.base)

    def ask(self, slots: list[int], then: Callable[[Stacks], None]) -> None:
        """Ask some ranks; the answer comes on the timers' thread, in a bounded time."""
        found = Stacks()

        def over() -> None:
            found.told.update(dict.fromkeys(filter(self._link.has_left, slots), HAS_LEFT))
            found.told.update(request.answers)
            self._timers.soon(lambda: then(found))

        with self._lock:
            asked = [slot for slot in slots if not self._link.has_left(slot)]
            request = self._requests.open(asked)
            request.then(over)
            if asked:
                self._timers.after(SILENT_AFTER_S, lambda: self._look_at(request, found))
                self._timers.after(STACKS_WITHIN_S, lambda: self._requests.drop(request))
                self._link.send(asked, AskStack(request.token))

    def answered(self, slot: int, answer: Stack) -> None:
        """A rank has said what it is doing."""
        with self._lock:
            self.ran[slot] = answer.running
        self._requests.answered(answer.token, slot, answer.text)

    def renew(self) -> None:
        """Begin anew with other workers. The lock is held."""
        self._requests = Requests(self._link.base)
        self.ran.clear()

    def _look_at(self, request: Request[int, str], found: Stacks) -> None:
        def seen(slot: int, what: str | None) -> None:
            if what is not None:
                found.seen[slot] = what

        if not request.over:
            for slot in request.owing:
                self._link.look(slot, partial(seen, slot))
