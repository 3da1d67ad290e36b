"""Pauses background roles from the driver: the ranks agree on a last call, and then come to rest.

Each rank is asked to begin no further call, and answers with the last call that it has begun. The highest of these is
the last call on all ranks: ranks that have begun it may wait for their peers' parts. The other half is in
`worker/lane_order.py`.
"""

from __future__ import annotations

import attrs

from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._protocol.requests import Request, Requests
from colocate._system.deadline import Deadline
from colocate.errors import ColocateError, RoleError
from colocate.features.pausing.messages import Pause, PauseAfter, PauseBegun, ResumeRole, RoleAtRest


@attrs.define(eq=False)
class _Pause:
    """The current pause of a role. If it fails, the earlier pause `former`, which was at rest, is restored."""

    number: int
    keeps: bool
    request: Request[int, int]  # The answers that the pausing thread waits for.
    former: _Pause | None
    last: int | None = None  # The last call that ranks begin; None until the ranks have agreed.
    error: ColocateError | None = None  # The reason why another thread ended this pause.

    @property
    def is_at_rest(self) -> bool:
        """Whether all ranks are at rest."""
        return self.last is not None and not self.request.owing

    def check_current(self) -> None:
        """Raise an error if another thread has ended this pause. The call order's lock must be held."""
        if self.error is not None:
            raise self.error


class Pauses:
    """The pauses of one group. All methods may be called from any thread."""

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._requests: Requests[int, int] = Requests(order.link.base)
        self._paused: dict[str, _Pause] = {}  # by role

    def pause_role(self, role: str, how: str, timeout: float | None) -> None:
        """Stop a role from beginning calls, and wait until the role is at rest; see `ColocatedGroup.pause`."""
        order, link, deadline = self._order, self._order.link, Deadline(timeout)
        with order.lock:
            request = self._requests.open(live := link.live_slots())
            former = self._overtake(role, "paused anew")
            pause = self._paused[role] = _Pause(request.token, how == "keep", request, former)
        try:
            # Calls are sent under this lock, too, so that all ranks get pauses and calls in the same order.
            with order.lock:
                pause.check_current()
                link.send(live, Pause(pause.number, role))
            begun = max(pause.request.result(deadline), default=0)
            with order.lock:
                pause.check_current()
                calls = list(order.pending.values())
                pause.request = self._requests.open(live)
                pause.last = self._last_call(role, begun, calls) if former is None else former.last
                self._send_pause(role, pause, pause.request.token)
            for call in calls if how == "abort" else ():
                if call.lane == role and call.seq <= begun:
                    why = f"{call.label} was aborted: group.pause({role!r}, how='abort') of group {link.name!r}"
                    where = {"group": link.name, "role": role, "method": call.method, "called_at": call.called_at}
                    order.abort_call(call, RoleError(why, **where))
            pause.request.result(deadline)
        except BaseException as error:
            self._restore_former(role, pause)
            if not isinstance(error, TimeoutError):
                raise
            owing, on = ", ".join(map(str, pause.request.owing)), "keeps running" if former is None else "is unchanged"
            raise TimeoutError(
                f"role {role!r} of group {link.name!r} isn't paused after {timeout} s, and {on}: a call still runs on "
                f"slot {owing}. how='keep' waits only for its next ctx.pause_point(); how='abort' fails the call"
            ) from None
        finally:
            self._requests.drop_request(pause.request)

    def is_paused(self, role: str) -> bool:
        """Return whether a role is paused or about to be."""
        return role in self._paused

    def check_call(self, call: PendingCall) -> None:
        """Refuse a call on all roles if the call would wait for a paused role. The call order's lock must be held.

        Raises:
            ColocateError: An earlier call uses a result that the paused role hasn't made.
        """
        for role, pause in self._paused.items():
            for user, maker in self._find_uses(role, list(self._order.pending.values())):
                if pause.last is not None and maker.seq > pause.last:
                    raise ColocateError(
                        f"{call.label} would wait for {user.label}, which was called at {user.called_at} and uses what "
                        f"{maker.label} makes, and that waits as role {role!r} is paused: nothing would go on. Call "
                        f"group.resume({role!r}) first, and pause it again where that is needed",
                        group=self._order.link.name,
                        role=call.role or None,
                        method=call.method,
                    )

    def resume_role(self, role: str) -> None:
        """Resume a paused role."""
        with self._order.lock:
            self._overtake(role, "resumed")
            if (pause := self._paused.pop(role, None)) is not None:
                self._order.link.send(self._order.link.live_slots(), ResumeRole(role, pause.number))

    def on_answer(self, slot: int, answer: PauseBegun | RoleAtRest) -> None:
        """Record a rank's answer: the last call that began there, or that the role is at rest."""
        self._requests.add_answer(answer.token, slot, answer.begun if isinstance(answer, PauseBegun) else 0)

    def fail_requests(self, error: ColocateError) -> None:
        """Drop all pauses and fail their requests, because no rank will answer any more."""
        self._paused.clear()
        self._requests.fail_all(error)

    def _overtake(self, role: str, how: str) -> _Pause | None:
        """End another thread's unfinished pause of a role. Return the pause at rest, if any.

        The order's lock must be held.
        """
        if (pause := self._paused.get(role)) is None or pause.is_at_rest:
            return pause
        pause.error = ColocateError(
            f"role {role!r} of group {self._order.link.name!r} was {how} by another thread before it was at rest: this "
            "pause is over, and the other thread's word counts",
            group=self._order.link.name,
            role=role,
        )
        self._requests.fail_request(pause.request, pause.error)
        return pause.former

    def _restore_former(self, role: str, pause: _Pause) -> None:
        """Undo a failed pause, unless another thread has changed the role's pause since."""
        with self._order.lock:
            if self._paused.get(role) is not pause:
                return
            if (former := pause.former) is None:
                self.resume_role(role)
                return
            former.number = pause.number  # The ranks know the restored pause by this number.
            self._paused[role] = former
            self._send_pause(role, former, self._requests.open(()).token)

    def _send_pause(self, role: str, pause: _Pause, token: int) -> None:
        assert pause.last is not None
        self._order.link.send(
            self._order.link.live_slots(), PauseAfter(token, role, pause.number, pause.last, pause.keeps)
        )

    def _last_call(self, role: str, begun: int, calls: list[PendingCall]) -> int:
        """Return the number of the last call that ranks begin.

        Calls that make arguments for other lanes are included.
        """
        return max([begun, *(maker.seq for _, maker in self._find_uses(role, calls))])

    def _find_uses(self, role: str, calls: list[PendingCall]) -> list[tuple[PendingCall, PendingCall]]:
        """Return pairs: a call on another lane, and the role's unfinished call that makes one of its arguments."""
        link = self._order.link
        return [
            (call, maker)
            for call in calls
            for maker in [use._kept.call for use in call.uses]
            if call.lane != role == maker.lane and maker.link is link and not maker.done()
        ]
