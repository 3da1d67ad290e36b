"""Cancelling a call, the driver's half: one that no rank has begun goes from all of them, or from none.

Each rank is asked to hold the call up; it says whether it hadn't begun it. If none had, all are told to drop it; if one
had, or one doesn't answer, all go on, and the call is told that nobody waits for it (`ctx.cancelled`). The other half
is in `worker/lane_order.py`.
"""

from __future__ import annotations

from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._protocol.from_worker import CanWithdraw
from colocate._protocol.requests import Requests
from colocate._protocol.to_worker import Decided, Withdraw
from colocate._system.limits import WITHDRAWN_WITHIN_S
from colocate.errors import CallCancelled, ColocateError


class Cancellations:
    """The cancellations of one group. All methods may be called from any thread."""

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._requests: Requests[int, bool] = Requests(order.link.base)

    def cancel(self, call: PendingCall) -> bool:
        """Withdraw a call, if no rank has begun it; whether it was.

        Waits for an answer of each rank's receiving thread: not of the lane, which may be busy.
        """
        order = self._order
        with order.lock:
            if call.seq not in order.pending:
                return False
            live = set(order.link.live())
            slots = [slot for slot in call.targets if slot in live]
            request = self._requests.open(slots)
        order.link.send(slots, Withdraw(request.token, call.seq, call.lane))
        request.wait(WITHDRAWN_WITHIN_S)
        self._requests.drop(request)
        with order.lock:
            can = request.error is None and not request.owing and all(request.answers.values())
            drop = can and call.seq in order.pending
            order.link.send(slots, Decided(request.token, call.seq, drop, call.lane))
            if drop:
                order.drop(call, CallCancelled(f"{call.label} was cancelled before any rank had begun it"))
            return drop

    def answered(self, slot: int, answer: CanWithdraw) -> None:
        """A rank has said whether it can do without a call; one that can't decides it."""
        request = self._requests.answered(answer.token, slot, answer.can)
        if request is not None and not answer.can:
            self._requests.drop(request)

    def gone(self, slot: int) -> None:
        """A rank has ended: its group fails, and what is asked with it."""
        self._requests.gone(slot, ColocateError(f"worker {slot} has ended"))
