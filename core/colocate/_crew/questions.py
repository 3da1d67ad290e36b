"""What workers ask the driver: where another worker is, what fits together, and when their peers are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from colocate._calls.order import CallOrder
from colocate._crew.taught import Taught
from colocate._crew.worker import Worker
from colocate._protocol import from_worker, questions, to_worker

if TYPE_CHECKING:
    from colocate._calls.pending import PendingCall

Tell: TypeAlias = Callable[[Any, str | None], None]
Locate: TypeAlias = Callable[[questions.WhereIs, Tell], None]
"""Tells where a worker is reached."""


@attrs.define
class _Meeting:
    """Who is there, and what one of them has brought."""

    there: list[Tell] = attrs.field(factory=list)
    slots: set[int] = attrs.field(factory=set)
    value: Any = None
    refusal: str | None = None


class Questions:
    """Answers the workers of one group."""

    def __init__(self, order: CallOrder, taught: Taught, locate: Locate) -> None:
        self._order = order
        self._taught = taught
        self._locate = locate
        self._meetings: dict[str, _Meeting] = {}

    def asked(self, worker: Worker, asked: from_worker.Ask) -> None:
        """A worker has asked something."""

        def tell(answer: Any, error: str | None = None) -> None:
            worker.send(to_worker.Answer(asked.token, answer, error))

        match asked.question:
            case questions.WhereIs() as question:
                self._locate(question, tell)
            case questions.Aligned() as question:
                self._aligned(question, tell)
            case questions.HeardAll():
                tell(None)
            case questions.Meet() as question:
                self._meet(worker.slot, question, tell)
            case question:
                self._taught.asked(worker, question, tell)

    def _meet(self, slot: int, asked: questions.Meet, tell: Tell) -> None:
        """Tell all members the value that one of them has brought, once all are there, or why one can't come.

        Nobody comes any more once the call has failed: then the hold ends the wait in the worker.
        """
        with self._order.lock:
            meeting = self._meetings.setdefault(asked.board, _Meeting())
            if asked.joins and not meeting.slots:
                self._order.link.send([each for each in self._order.link.live() if each != slot], to_worker.Join())
            meeting.there.append(tell)
            meeting.slots.add(slot)
            meeting.refusal = meeting.refusal or asked.refusal
            if asked.value is not None:
                meeting.value = asked.value
            if meeting.refusal is not None or len(meeting.slots) == asked.members:
                for told in meeting.there:
                    told(meeting.value, meeting.refusal)
                meeting.there.clear()
            if len(meeting.slots) == asked.members:
                del self._meetings[asked.board]

    def _aligned(self, asked: questions.Aligned, tell: Tell) -> None:
        """Which of the other residents that a call uses have the partition of the first, once all of them are made."""
        call = self._order.pending.get(asked.seq)
        uses = {use._kept.source.key: use._kept for use in call.uses} if call is not None else {}
        if asked.key not in uses:
            tell(None, "the call has failed on another rank")
            return
        kept = [uses[asked.key], *(uses[other] for other in asked.others)]

        def answer() -> None:
            failed = next((each.call._error for each in kept if each.call._error is not None), None)
            if failed is not None:
                tell(None, f"{type(failed).__name__}: {failed}")
                return
            sizes = [each.sizes() for each in kept]
            tell([other for other, own in zip(asked.others, sizes[1:], strict=True) if own == sizes[0]], None)

        left = [each.call for each in kept if not each.call.done()]
        waiting = len(left)

        def made(_: PendingCall) -> None:  # one at a time, on the timers' thread
            nonlocal waiting
            waiting -= 1
            if not waiting:
                answer()

        for each in left:
            each._then(made)
        if not left:
            answer()
