"""Pauses of background roles, the driver's half: the ranks agree on the last call that they begin, and come to rest.

Each rank is asked to begin no further call, and says which one it has begun last. The highest of these is the last that
all of them begin: others may wait for their parts of it. The other half is in `worker/lane_order.py`.
"""

from __future__ import annotations

from colocate._calls.order import CallOrder
from colocate._protocol.from_worker import Paused, Pausing
from colocate._protocol.requests import Requests
from colocate._protocol.to_worker import GoOn, Pause, PauseAfter
from colocate._system.deadline import Deadline
from colocate.errors import ColocateError, RoleError


class Pauses:
    """Those of one group. All methods may be called from any thread."""

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._requests: Requests[int, int] = Requests(order.link.base)
        self._last: dict[str, int] = {}  # the number of the last pause of each role that is paused

    def pause(self, role: str, how: str, timeout: float | None) -> None:
        """Have a role begin no further call, and wait until it does nothing; see `ColocatedGroup.pause`."""
        order, link, deadline = self._order, self._order.link, Deadline(timeout)
        was_paused = role in self._last
        request = self._requests.open(())
        try:
            # With the lock, as calls are sent: all ranks get both in one order.
            with order.lock:
                request = self._requests.open(live := link.live())
                number = self._last[role] = request.token
                link.send(live, Pause(number, role))
            last = max(request.result(deadline), default=0)
            with order.lock:
                request = self._requests.open(live)
                link.send(live, PauseAfter(request.token, role, number, last, how == "keep"))
                runs = [call for call in list(order.pending.values()) if call.lane == role and call.seq <= last]
            for call in runs if how == "abort" else ():
                why = f"{call.label} was aborted: group.pause({role!r}, how='abort') of group {link.name!r}"
                where = {"group": link.name, "role": role, "method": call.method, "called_at": call.called_at}
                order.break_off(call, RoleError(why, **where))
            request.result(deadline)
        except BaseException as error:
            if not was_paused:
                self.resume(role)
            if not isinstance(error, TimeoutError):
                raise
            owing, on = ", ".join(map(str, request.owing)), "is as it was" if was_paused else "goes on"
            raise TimeoutError(
                f"role {role!r} of group {link.name!r} isn't paused after {timeout} s, and {on}: a call still runs on "
                f"slot {owing}. With how='keep' it stops where its method calls ctx.pause_point(); 'abort' gives it up"
            ) from None
        finally:
            self._requests.drop(request)

    def is_paused(self, role: str) -> bool:
        """Whether a role is, or is about to be."""
        return role in self._last

    def resume(self, role: str) -> None:
        """Have a role go on."""
        with self._order.lock:
            if (number := self._last.pop(role, None)) is not None:
                self._order.link.send(self._order.link.live(), GoOn(role, number))

    def answered(self, slot: int, answer: Pausing | Paused) -> None:
        """A rank has said which call it began last, or that it rests."""
        self._requests.answered(answer.token, slot, answer.begun if isinstance(answer, Pausing) else 0)

    def fail(self, error: ColocateError) -> None:
        """No rank will answer any more."""
        self._requests.fail_all(error)
