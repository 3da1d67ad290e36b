"""Cancelling a call, the driver's half: one that no rank has begun goes from all of them, or from none.

Each rank is asked to hold the call up; it says whether it hadn't begun it. If none had, all are told to drop it; if one
had, or one doesn't answer, all go on, and the call is told that nobody waits for it (`ctx.cancelled`). `worker/lane.py`
has the other half.
"""

from __future__ import annotations

import itertools
import threading

import attrs

from colocate._order import CallOrder
from colocate._pending import PendingCall
from colocate.errors import CallCancelled

_ANSWER_WITHIN_S = 1.0  # a rank answers at once, unless it holds the GIL or is stopped: then it has begun something


@attrs.define(eq=False)
class _Question:
    waiting: set[int]
    all_can: bool = True
    answered: threading.Event = attrs.field(factory=threading.Event)


class Cancellations:
    """Those of one group. All methods may be called from any thread."""

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._tokens = itertools.count(order.link.base + 1)
        self._asked: dict[int, _Question] = {}

    def cancel(self, call: PendingCall) -> bool:
        """Withdraw a call, if no rank has begun it; whether it was.

        Waits for an answer of each rank's receiving thread: not of the lane, which may be busy.
        """
        order, token = self._order, next(self._tokens)
        with order.lock:
            if call.seq not in order.pending:
                return False
            live = set(order.link.live())
            slots = [slot for slot in call.targets if slot in live]
            question = self._asked[token] = _Question(set(slots))
        order.link.send(slots, ("withdraw", token, call.seq))
        if slots:
            question.answered.wait(_ANSWER_WITHIN_S)
        with order.lock:
            del self._asked[token]
            drop = question.all_can and not question.waiting and call.seq in order.pending
            order.link.send(slots, ("decided", token, call.seq, drop))
            if drop:
                order.drop(call, CallCancelled(f"{call.label} was cancelled before any rank had begun it"))
            return drop

    def answered(self, slot: int, token: int, can: bool) -> None:
        """A rank has said whether it can do without a call."""
        with self._order.lock:
            question = self._asked.get(token)
            if question is None:
                return
            question.waiting.discard(slot)
            question.all_can = question.all_can and can
            if not can or not question.waiting:
                question.answered.set()

    def gone(self, slot: int) -> None:
        """A rank has ended: its group fails, and what is asked with it."""
        for question in list(self._asked.values()):
            if slot in question.waiting:
                question.all_can = False
                question.answered.set()
