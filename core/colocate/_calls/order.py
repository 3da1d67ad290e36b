"""Keep one total order of a group's calls, and hold all ranks at a barrier after a failure. This is the driver's side.

After a failure no rank begins the failed call or a later one until all ranks have stopped (see `worker/lane_order.py`
for the workers' side). Then the failed call is withdrawn from the ranks that hadn't begun it, and so is any later call
that failed on a rank. All other calls continue. A rank that doesn't stop within the grace period fails the group.

A call that no rank has begun can be cancelled: each rank is asked to pause it, and answers whether it hadn't begun.
If none had, all ranks drop the call. If one had, or doesn't answer, the call continues with `ctx.cancelled` set.

Calls of a background role have an order and holds of their own. Numbers belong to the group: a call that concerns
all roles has its place in each order by its number.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs

from colocate._calls.failures import (
    failure_error,
    hung_error,
    later_error,
    timeout_error,
)
from colocate._calls.pending import PendingCall
from colocate._protocol import from_worker, to_worker
from colocate._protocol.consequence import CAUSE_MAY_COME_LATE
from colocate._protocol.requests import Request, Requests
from colocate._signals.in_framework import Section
from colocate._system.jobs import Timer
from colocate._system.limits import (
    ALIVE_WITHIN_S,
    SILENT_AFTER_S,
    STACKS_WITHIN_S,
    WITHDRAWN_WITHIN_S,
)
from colocate.errors import CallCancelled, ColocateError

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup

NO_ANSWER = "no answer (C code may hold the GIL, or it is stopped)"
"""Placeholder for a rank's stack, if neither the rank nor its machine answers."""
HAS_LEFT = "running nothing; its lane has ended"
"""Placeholder for the stack of a rank that runs no more role code, according to the worker's report."""


@attrs.define(eq=False)
class Hold:
    """A hold in progress, the barrier at which all ranks stop after a failure.

    Attributes:
        number: The hold's number in ranks' answers; `lane` is the background role, "" for the main lane.
        waiting: The slots of ranks that haven't stopped, or are in a phase before all continue.
        parts: State of features, by feature name.
        back: The reports of stopped ranks, by slot.
        phase: The work of all stopped ranks before they continue, and its timeout in seconds.
    """

    number: int
    lane: str
    failed: int
    waiting: set[int]
    silent: set[int]
    withdrawn: set[int] = attrs.field(factory=set)
    root: ColocateError | None = None
    suspected: tuple[PendingCall, ColocateError] | None = None
    later: list[tuple[PendingCall, ColocateError, bool]] = attrs.field(factory=list)  # The flag marks a consequence.
    timer: Timer | None = None
    armed: float = 0.0  # Time of the timer's start, in seconds of time.time().
    failures: list[PendingCall] = attrs.field(factory=list)  # Failed calls, which don't continue after the hold.
    patient: bool = False  # Whether a better cause may arrive from a rank that still runs.
    parts: dict[str, Any] = attrs.field(factory=dict)
    back: dict[int, from_worker.Held] = attrs.field(factory=dict)
    phase: tuple[str, float] | None = None

    def cause(self) -> ColocateError | None:
        return self.root or (self.suspected[1] if self.suspected is not None else None)

    def ended(self) -> Sequence[PendingCall]:
        """Return the calls that don't continue after the hold."""
        return (*self.failures, *(call for call, _, _ in self.later), *(self.suspected or ())[:1])


@attrs.frozen
class Stacks:
    """The stacks of several ranks at one time.

    Attributes:
        told: Answers by slot.
        seen: Descriptions from outside the process by slot, for ranks without an answer, if possible.
    """

    told: dict[int, str] = attrs.field(factory=dict)
    seen: dict[int, str] = attrs.field(factory=dict)

    def of(self, slot: int) -> str:
        """Return a rank's stack, or a placeholder for an unknown stack."""
        return self.told.get(slot) or self.seen.get(slot) or NO_ANSWER


class CallOrder:
    """The order of one group's calls. All methods may be called from any thread.

    Attributes:
        lock: Lock for all changes of calls.
        pending: The calls that were sent and aren't done, by number.
        stacks: The questions for ranks' stacks.
    """

    def __init__(self, link: WorkerGroup) -> None:
        self.lock = Section()
        self.pending: dict[int, PendingCall] = {}
        self.link = link
        self._timers = link.services.timers
        self.stacks = StackQuestions(link, self.lock)
        self._withdrawals: Requests[int, bool] = Requests(link.base)
        self._last_seq = link.base  # Number 0 belongs to the construction of the roles.
        self._resumed: dict[str, int] = {}  # Number of the last finished hold, by lane.
        self._holds: dict[str, Hold] = {}  # The hold in progress, by lane.
        self._ended: dict[tuple[str, int], float] = {}  # End of the last reported call, by lane and slot.

    def renew(self) -> None:
        """Reset the state for new workers, after `fail_all`. The lock is held."""
        self._resumed.clear()  # The lanes of new workers count holds from the beginning again.
        self._forget_holds()  # The holds belong to the previous generation of workers.
        self.stacks.renew()

    # -- submission

    @property
    def next_seq(self) -> int:
        return self._last_seq + 1

    def enter(self, call: PendingCall) -> int:
        """Assign a call the next place in the order. The caller holds the lock until the call is sent."""
        call.unsent = None
        call.link = self.link
        self._last_seq = call.seq = self._last_seq + 1
        self.pending[call.seq] = call
        return call.seq

    def give_up(self, call: PendingCall, error: BaseException, sent: bool) -> None:
        """Fail a call that couldn't be sent to all ranks. If `sent`, some ranks may have the call. The lock is held."""
        if sent and call.lane not in self._holds:
            self._begin_hold(call.seq, known=None, cut=True, lane=call.lane)
        if (hold := self._holds.get(call.lane)) is not None:
            hold.withdrawn.add(call.seq)
        self._end(call, error)
        call._fail(error)

    def drop(self, call: PendingCall, error: BaseException) -> None:
        """Fail a call that will never be sent, or has been withdrawn from all ranks."""
        with self.lock:
            if not call.done():
                call.unsent = None
                self._end(call, error)
                call._fail(error)

    def cancel(self, call: PendingCall) -> bool:
        """Withdraw a call that no rank has begun; return whether the call was withdrawn.

        Waits for each rank's receiving thread, not for the lane, which may be busy.
        """
        with self.lock:
            if call.seq not in self.pending:
                return False
            live = set(self.link.live())
            slots = [slot for slot in call.targets if slot in live]
            request = self._withdrawals.open(slots)
        is_dropped = False
        try:
            self.link.send(slots, to_worker.Withdraw(request.token, call.seq, call.lane))
            request.wait(WITHDRAWN_WITHIN_S)
        finally:  # This also runs after an interruption, because ranks wait for the decision.
            self._withdrawals.drop(request)
            with self.lock:
                can = request.error is None and not request.owing and all(request.answers.values())
                is_dropped = can and call.seq in self.pending
                self.link.send(slots, to_worker.Decided(request.token, call.seq, is_dropped, call.lane))
                if is_dropped:
                    self.drop(call, CallCancelled(f"{call.label} was cancelled before any rank had begun it"))
        return is_dropped

    def watch(self, call: PendingCall, timeout: float) -> None:
        """Start a timer that fails a call after `timeout` seconds."""
        with self.lock:
            if not call.done() and call.timer is None:
                call.timer = self._timers.after(timeout, partial(self.late, weakref.ref(call), timeout))

    # -- what workers say

    def done(self, slot: int, done: from_worker.Done, body: Any) -> None:
        """Record a rank's result of a call."""
        with self.lock.lock:  # A plain lock is enough on our own thread, and faster.
            call = self.pending.get(done.seq)
            if done.parts:
                self._tell_ended(slot, done.seq, done.parts)
            if call is None:  # The call has already failed elsewhere.
                return
            index = call.index_of(slot)
            call.bodies[index] = done.size if body is None else body
            call.rows[index] = done.rows
            call.spans.append((index, done.start, done.end))
            self._ended[call.lane, slot] = done.end
            if done.taken:
                call.taken = {**call.taken, index: done.taken}
            call.remaining -= 1
            if call.remaining == 0:
                # The call counts as failed, because a used resident's call has failed meanwhile.
                poison = call.poison() if call.uses else None
                self._end(call, poison)
                if poison is None:
                    call._settle(call.bodies)
                else:
                    call._fail(poison)

    def failed(self, slot: int, failed: from_worker.Failed, body: Any) -> None:
        """Record that a call has failed on a rank, and that the rank has stopped."""
        with self.lock:
            seq, failure = failed.seq, failed.failure
            call = self.pending.get(seq)
            hold = self._holds.get(failed.lane)
            if failure.secondary and self.link.closed_by is not None:
                return  # The group's end has interrupted the call's wait, and is reported to all callers.
            if hold is None:  # If there is a hold already, another rank has failed first.
                hold = self._begin_hold(seq, known=slot, lane=failed.lane)
            self.link.halted(hold, slot, failed.parts, False)
            self._tell_ended(slot, seq, failed.parts)
            if call is None:
                return
            index = call.index_of(slot)
            call.spans.append((index, failed.start, failed.end))
            self._ended[call.lane, slot] = failed.end
            call.raised = (*call.raised, index)
            if failed.taken:
                call.taken = {**call.taken, index: failed.taken}
            poison = call.poison()
            error = poison or failure_error(self.link, call, slot, failure, body)
            if seq > hold.failed and seq not in hold.withdrawn:  # This is sent once, after the first rank's failure.
                self.link.send(self.link.live(), to_worker.Unwanted(seq))
            hold.withdrawn.add(seq)
            self._lower(hold, seq)
            if failure.secondary and hold.root is None and poison is None:
                # A lost connection or resident is a consequence, and a report of the cause is still to come.
                hold.patient = hold.patient or failure.type in CAUSE_MAY_COME_LATE
                self._suspect(hold, call, error)
            elif seq > hold.failed and (hold.root or hold.suspected):
                hold.later.append((call, error, failure.secondary))
            else:
                self._tell_root(hold, call, error)

    def can_withdraw(self, slot: int, answer: from_worker.CanWithdraw) -> None:
        """Record a rank's vote on the withdrawal of a call. One refusal ends the vote."""
        request = self._withdrawals.answered(answer.token, slot, answer.can)
        if request is not None and not answer.can:
            self._withdrawals.drop(request)

    def alive(self, slot: int, alive: from_worker.Alive) -> None:
        """Record a rank's acknowledgement of a hold."""
        with self.lock:
            hold = self._holds.get(alive.lane)
            if hold is not None and hold.number == alive.number:
                hold.silent.discard(slot)
                self._check_suspicion(hold)

    def held(self, slot: int, held: from_worker.Held) -> None:
        """Record that a rank has stopped in a hold."""
        with self.lock:
            hold = self._holds.get(held.lane)
            if hold is None or hold.number != held.number:
                return
            hold.waiting.discard(slot)
            hold.silent.discard(slot)
            hold.back[slot] = held
            self.link.halted(hold, slot, held.parts, True)
            if not hold.waiting and not self.link.all_back(hold):
                self._resume(hold)

    def begin_phase(self, hold: Hold, what: str, within_s: float) -> None:
        """Start a phase of a hold, in which all stopped ranks do some work and wait again. The lock is held.

        `phase_over` follows for each rank.

        Args:
            hold: The hold in which all ranks have stopped.
            what: Description of the work, for errors.
            within_s: Timeout in seconds.
        """
        hold.waiting, hold.phase = set(self.link.live()), (what, within_s)
        if hold.timer is not None:
            hold.timer.cancel()
        self._arm(hold, within_s)

    def phase_over(
        self, slot: int, number: int, error: Callable[[ColocateError | None], ColocateError] | None = None
    ) -> None:
        """Record that a rank has finished a phase of the main lane's hold. With `error`, fail the group instead.

        Args:
            slot: The rank's slot.
            number: The hold's number.
            error: Makes the group's error from the hold's cause.
        """
        with self.lock:
            hold = self._holds.get("")
            if hold is None or hold.number != number:
                return
            hold.waiting.discard(slot)
            if error is not None:
                self.link.fail(error(hold.cause()))
            elif not hold.waiting:
                self._resume(hold)

    def gone(self, slot: int) -> None:
        """Record a rank's exit, so that no hold or vote waits for the rank any more."""
        self._withdrawals.gone(slot, ColocateError(f"worker {slot} has ended"))
        with self.lock:
            for hold in self._holds.values():
                hold.waiting.discard(slot)
                hold.silent.discard(slot)

    def fail_all(self, error: ColocateError) -> bool:
        """Fail every pending call with one error; return whether there was a call."""
        with self.lock:
            calls = list(self.pending.values())
            for lane in {call.lane for call in calls}:
                self._note_running(lane, [call for call in calls if call.lane == lane], set())
            for call in calls:
                self._end(call, error)
                call._fail(error)
            self._forget_holds()
            return bool(calls)

    def begin_anew(self, background: Iterable[str] = ()) -> None:
        """Stop all ranks by a hold, to end the work of an earlier driver before any new call.

        Args:
            background: The group's background roles.
        """
        with self.lock:
            for lane in ("", *background):
                self._begin_hold(self.link.base, known=None, cut=True, lane=lane)

    # -- the hold

    def _forget_holds(self) -> None:
        for hold in self._holds.values():
            if hold.timer is not None:
                hold.timer.cancel()
        self._holds.clear()

    def _begin_hold(self, failed: int, known: int | None, cut: bool = False, lane: str = "") -> Hold:
        live = self.link.live()
        hold = Hold(self._resumed.get(lane, self.link.base) + 1, lane, failed, set(live), set(live) - {known})
        hold.withdrawn.add(failed)
        self._holds[lane] = hold
        self._arm(hold, self.link.grace)
        # The failed rank gets the hold, too, because another async call there may wait for peers.
        self.link.send(live, to_worker.Hold(hold.number, failed, cut, lane))
        return hold

    def _lower(self, hold: Hold, seq: int) -> None:
        if seq < hold.failed:
            hold.failed = seq
            self.link.send(self.link.live(), to_worker.Hold(hold.number, seq, False, hold.lane))

    def _tell_root(self, hold: Hold, call: PendingCall, error: ColocateError) -> None:
        if hold.root is None or call.seq <= hold.failed:
            hold.root = error
        earlier = itertools.takewhile(lambda each: each.seq < call.seq, list(self.pending.values()))
        busy = {slot for each in earlier if each.lane == call.lane for slot in each.missing()}
        self._note_running(call.lane, [call], busy)
        self._end(call, error)
        call._fail(error)

    def _suspect(self, hold: Hold, call: PendingCall, error: ColocateError) -> None:
        if hold.suspected is not None:
            if hold.suspected[0] is call and hold.suspected[1]._follows and not error._follows:
                hold.suspected = call, error  # The new error has more information.
            else:
                hold.later.append((call, error, True))
            return
        hold.suspected = call, error
        self._timers.after(ALIVE_WITHIN_S, lambda: self._settle_suspicion(hold))
        self._check_suspicion(hold)

    def _check_suspicion(self, hold: Hold) -> None:
        if not hold.silent and not hold.patient:
            self._settle_suspicion(hold)

    def _settle_suspicion(self, hold: Hold) -> None:
        """Report the suspected error to the caller, because no better cause has arrived.

        For a rank that has left, the cause is still coming: its supervisor reports the exit once all children are
        gone.
        """
        with self.lock:
            if any(map(self.link.has_left, range(self.link.size))):
                return
            if hold.suspected is not None and hold.root is None and not hold.suspected[0].done():
                call, error = hold.suspected
                self._tell_root(hold, call, call.poison() or error)

    def _resume(self, hold: Hold) -> None:
        self._settle_suspicion(hold)
        if hold.suspected is not None:
            hold.later.append((*hold.suspected, True))
        for later, error, follows in sorted(hold.later, key=lambda item: item[0].seq):
            if not later.done():
                error = later.poison() or later_error(error, hold.root, follows)
                self._end(later, error)
                later._fail(error)
        if hold.timer is not None:
            hold.timer.cancel()
        self.link.report_unfinished(hold.back)
        self._resumed[hold.lane] = hold.number
        del self._holds[hold.lane]
        self.link.send(self.link.live(), to_worker.Resume(hold.number, sorted(hold.withdrawn), hold.lane))

    def _arm(self, hold: Hold, seconds: float) -> None:
        hold.armed = time.time()
        hold.timer = self._timers.after(seconds, lambda: self._overdue(hold))

    def _overdue(self, hold: Hold) -> None:
        with self.lock:
            if self._holds.get(hold.lane) is not hold:
                return
            if (stood := self.link.stood(hold.armed)) > 0.0:
                self._arm(hold, stood)
                return
            # A rank that still runs an earlier call isn't stuck, because calls have no deadline by default.
            earlier = [call for seq, call in list(self.pending.items()) if seq < hold.failed]
            busy = {
                slot for other in earlier if other.lane == hold.lane or other.is_for_all for slot in other.missing()
            }
            stuck = sorted(hold.waiting - busy)
            if not stuck:
                self._arm(hold, self.link.grace)
                return
        self.stacks.ask(stuck, lambda found: self._give_up(hold, stuck, found))

    def _give_up(self, hold: Hold, stuck: list[int], stacks: Stacks) -> None:
        with self.lock:
            still = [slot for slot in stuck if slot in hold.waiting]
            if self._holds.get(hold.lane) is hold and still:
                self.link.fail(hung_error(self.link, still[0], hold.phase, hold.cause(), stacks.of(still[0])))

    # -- deadlines

    def late(self, ref: weakref.ref[PendingCall], timeout: float) -> None:
        """Fail a call that has exceeded the timeout, unless the call is settled or was never sent."""
        call = ref()
        if call is None or call.done() or call.seq < 0:
            return
        if (stood := self.link.stood(call.submitted)) > 0.0:
            remaining_s = call.submitted + timeout + stood - time.time()
            if remaining_s > 0.0:
                call.timer = self._timers.after(remaining_s, partial(self.late, ref, timeout))
                return
        self.stacks.ask(call.missing(), lambda found: self._time_out(call, timeout, found))

    def _time_out(self, call: PendingCall, timeout: float, stacks: Stacks) -> None:
        with self.lock:
            if not call.done():
                by_slot = {slot: stacks.of(slot) for slot in call.missing()}
                self.break_off(call, timeout_error(self.link, call, timeout, by_slot))

    def break_off(self, call: PendingCall, error: ColocateError) -> None:
        """Fail a call that may be running, and stop all ranks as after a failure."""
        with self.lock:
            if call.done():
                return
            if call.seq < 0:  # The call hasn't been sent yet.
                self.drop(call, error)
                return
            hold = self._holds.get(call.lane)
            if hold is None:
                hold = self._begin_hold(call.seq, known=None, cut=True, lane=call.lane)
            elif hold.phase is None:  # In a phase no call runs, and the ranks' work mustn't be interrupted.
                self._lower(hold, call.seq)
                live = self.link.live()
                self.link.send(live, to_worker.Unwanted(call.seq))
                self.link.send(live, to_worker.Hold(hold.number, hold.failed, True, hold.lane))
            hold.withdrawn.add(call.seq)
            if hold.suspected is not None and hold.suspected[0].seq < call.seq:
                self._settle_suspicion(hold)  # A later call can't be the cause of an earlier failure.
            self._tell_root(hold, call, error)

    def is_held(self, lane: str) -> bool:
        return lane in self._holds

    def still_running(self) -> set[int]:
        """Return the slots that still run a call which was running at the last stack report."""
        with self.lock:
            missing = {seq: call.missing() for seq, call in list(self.pending.items())}
            return {slot for slot, ran in self.stacks.ran.items() if any(slot in missing.get(seq, ()) for seq in ran)}

    def owing(self) -> set[int]:
        """Return the slots with unfinished calls."""
        with self.lock:
            return {slot for call in list(self.pending.values()) for slot in call.missing()}

    def oldest(self, slot: int | None = None) -> list[PendingCall]:
        """Return the oldest unfinished call of each lane, on the given slot or on any slot."""
        calls: dict[str, PendingCall] = {}
        for call in list(self.pending.values()):
            if call.lane not in calls and (slot is None or slot in call.missing()):
                calls[call.lane] = call
        return [*calls.values()]

    def _tell_ended(self, slot: int, seq: int, told: Mapping[str, Any]) -> None:
        failed = chain.from_iterable(hold.failures for hold in self._holds.values())
        for call in filter(
            None, (self.pending.get(seq), *(failed_call for failed_call in failed if failed_call.seq == seq))
        ):
            self.link.ended(call, slot, told)

    def _note_running(self, lane: str, calls: Iterable[PendingCall], busy: set[int]) -> None:
        """Record for each failed call the ranks that still run the call, and when each rank began.

        Args:
            lane: The lane of the calls.
            calls: The calls, in order.
            busy: Slots that run other calls.
        """
        pairs: list[tuple[PendingCall, int]] = []
        if (hold := self._holds.get(lane)) is not None:
            busy |= set(self.link.live()) - hold.waiting  # These ranks have stopped, and run no call.
            pairs = [(other, index) for other in hold.failures for index, _ in other.left]
        for call in calls:
            slots = call.missing()
            # These slots still run an earlier failed call.
            failed = {other.targets[index] for other, index in pairs if other.seq < call.seq}
            running = [slot for slot in slots if slot not in busy and slot not in failed]
            ended = [self._ended.get((lane, slot), 0.0) for slot in running]
            call.left = [
                (call.index_of(slot), max(call.submitted, since)) for slot, since in zip(running, ended, strict=True)
            ]
            busy.update(slots)

    def _end(self, call: PendingCall, error: BaseException | None) -> None:
        """Remove a call from the pending calls. The caller settles the call next, with this error, if any."""
        self.pending.pop(call.seq, None)
        if self._holds and (hold := self._holds.get(call.lane)) is not None and call.seq in hold.withdrawn:
            hold.failures.append(call)
        if call.timer is not None:
            call.timer.cancel()
        if call.on_end is not None:
            call.on_end(call, error)
            call.on_end = None


class StackQuestions:
    """The open requests for the stacks of one group's ranks.

    Attributes:
        ran: The calls that each rank ran at its last stack report.
    """

    def __init__(self, link: WorkerGroup, lock: Section) -> None:
        self.ran: dict[int, tuple[int, ...]] = {}
        self._link, self._timers, self._lock = link, link.services.timers, lock
        self._requests: Requests[int, str] = Requests(link.base)

    def ask(self, slots: list[int], then: Callable[[Stacks], None]) -> None:
        """Ask ranks for their stacks, and call `then` with the answers on the timers' thread, in a bounded time."""
        stacks = Stacks()

        def over() -> None:
            stacks.told.update(dict.fromkeys(filter(self._link.has_left, slots), HAS_LEFT))
            stacks.told.update(request.answers)
            self._timers.soon(lambda: then(stacks))

        with self._lock:
            responders = [slot for slot in slots if not self._link.has_left(slot)]
            request = self._requests.open(responders)
            request.then(over)
            if responders:
                self._timers.after(SILENT_AFTER_S, lambda: self._look_at(request, stacks))
                self._timers.after(STACKS_WITHIN_S, lambda: self._requests.drop(request))
                self._link.send(responders, to_worker.AskStack(request.token))

    def answered(self, slot: int, answer: from_worker.Stack) -> None:
        """Record a rank's stack."""
        with self._lock:
            self.ran[slot] = answer.running
        self._requests.answered(answer.token, slot, answer.text)

    def renew(self) -> None:
        """Reset the state for new workers. The lock is held."""
        self._requests = Requests(self._link.base)
        self.ran.clear()

    def _look_at(self, request: Request[int, str], found: Stacks) -> None:
        def seen(slot: int, what: str | None) -> None:
            if what is not None:
                found.seen[slot] = what

        if not request.over:
            for slot in request.owing:
                self._link.look(slot, partial(seen, slot))
