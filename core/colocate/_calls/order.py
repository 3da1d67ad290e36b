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
        reports: The reports of stopped ranks, by slot.
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
    # The bool says whether the error is only a consequence of another failure.
    later: list[tuple[PendingCall, ColocateError, bool]] = attrs.field(factory=list)
    timer: Timer | None = None
    armed_at: float = 0.0  # Time of the timer's start, in seconds of time.time().
    failures: list[PendingCall] = attrs.field(factory=list)  # Failed calls, which don't continue after the hold.
    is_patient: bool = False  # Whether a running rank may still report the real cause of the call's failure.
    parts: dict[str, Any] = attrs.field(factory=dict)
    reports: dict[int, from_worker.HoldReached] = attrs.field(factory=dict)
    phase: tuple[str, float] | None = None

    def cause(self) -> ColocateError | None:
        return self.root or (self.suspected[1] if self.suspected is not None else None)

    def failed_calls(self) -> Sequence[PendingCall]:
        """Return the calls that don't continue after the hold."""
        return (*self.failures, *(call for call, _, _ in self.later), *(self.suspected or ())[:1])


@attrs.frozen
class Stacks:
    """The stacks of several ranks at one time.

    Attributes:
        answers: Answers by slot.
        outside_views: Descriptions from outside the process by slot, for ranks without an answer, if possible.
    """

    answers: dict[int, str] = attrs.field(factory=dict)
    outside_views: dict[int, str] = attrs.field(factory=dict)

    def describe_slot(self, slot: int) -> str:
        """Return a rank's stack, or a placeholder for an unknown stack."""
        return self.answers.get(slot) or self.outside_views.get(slot) or NO_ANSWER


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

    def start_generation(self) -> None:
        """Reset the state for new workers, after `fail_all`. The caller holds the lock."""
        self._resumed.clear()  # The lanes of new workers count holds from the beginning again.
        self._forget_holds()  # The holds belong to the previous generation of workers.
        self.stacks.start_generation()

    # -- submission

    @property
    def next_seq(self) -> int:
        return self._last_seq + 1

    def enqueue_call(self, call: PendingCall) -> int:
        """Assign a call the next place in the order. The caller holds the lock until the call is sent."""
        call.unsent = None
        call.link = self.link
        self._last_seq = call.seq = self._last_seq + 1
        self.pending[call.seq] = call
        return call.seq

    def abandon_call(self, call: PendingCall, error: BaseException, sent: bool) -> None:
        """Fail a call that couldn't be sent to all ranks. With `sent`, some may have it. The caller holds the lock."""
        if sent and call.lane not in self._holds:
            self._start_hold(call.seq, known=None, cut=True, lane=call.lane)
        if (hold := self._holds.get(call.lane)) is not None:
            hold.withdrawn.add(call.seq)
        self._remove_call(call, error)
        call._set_error(error)

    def drop_call(self, call: PendingCall, error: BaseException) -> None:
        """Fail a call that will never be sent, or has been withdrawn from all ranks."""
        with self.lock:
            if not call.done():
                call.unsent = None
                self._remove_call(call, error)
                call._set_error(error)

    def cancel_call(self, call: PendingCall) -> bool:
        """Withdraw a call that no rank has begun; return whether the call was withdrawn.

        Waits for each rank's receiving thread, not for the lane, which may be busy.
        """
        with self.lock:
            if call.seq not in self.pending:
                return False
            live = set(self.link.live_slots())
            slots = [slot for slot in call.targets if slot in live]
            request = self._withdrawals.open(slots)
        is_dropped = False
        try:
            self.link.send(slots, to_worker.OfferCancel(request.token, call.seq, call.lane))
            request.wait_over(WITHDRAWN_WITHIN_S)
        finally:  # This also runs after an interruption, because ranks wait for the decision.
            self._withdrawals.drop_request(request)
            with self.lock:
                can = request.error is None and not request.owing and all(request.answers.values())
                is_dropped = can and call.seq in self.pending
                self.link.send(slots, to_worker.CancelDecision(request.token, call.seq, is_dropped, call.lane))
                if is_dropped:
                    self.drop_call(call, CallCancelled(f"{call.label} was cancelled before any rank had begun it"))
        return is_dropped

    def set_timeout(self, call: PendingCall, timeout: float) -> None:
        """Start a timer that fails a call after `timeout` seconds."""
        with self.lock:
            if not call.done() and call.timer is None:
                call.timer = self._timers.call_later(timeout, partial(self.on_timeout, weakref.ref(call), timeout))

    # -- what workers say

    def on_call_done(self, slot: int, done: from_worker.CallEnded, body: Any) -> None:
        """Record a rank's result of a call."""
        with self.lock.lock:  # A plain lock is enough on our own thread, and faster.
            call = self.pending.get(done.seq)
            if done.parts:
                self._report_call_end(slot, done.seq, done.parts)
            if call is None:  # The call has already failed elsewhere.
                return
            index = call.index_of(slot)
            call.bodies[index] = done.size if body is None else body
            call.rows[index] = done.rows
            call.spans.append((index, done.start, done.end))
            self._ended[call.lane, slot] = done.end
            if done.receipts:
                call.receipts = {**call.receipts, index: done.receipts}
            call.remaining -= 1
            if call.remaining == 0:
                # The call counts as failed, because a used resident's call has failed meanwhile.
                poison = call.find_poison() if call.uses else None
                self._remove_call(call, poison)
                if poison is None:
                    call._set_result(call.bodies)
                else:
                    call._set_error(poison)

    def on_call_failed(self, slot: int, failed: from_worker.Failed, body: Any) -> None:
        """Record that a call has failed on a rank, and that the rank has stopped."""
        with self.lock:
            seq, failure = failed.seq, failed.failure
            call = self.pending.get(seq)
            hold = self._holds.get(failed.lane)
            if failure.secondary and self.link.closed_by is not None:
                return  # The group's end has interrupted the call's wait, and is reported to all callers.
            if hold is None:  # If there is a hold already, another rank has failed before.
                hold = self._start_hold(seq, known=slot, lane=failed.lane)
            self.link.on_rank_halted(hold, slot, failed.parts, False)
            self._report_call_end(slot, seq, failed.parts)
            if call is None:
                return
            index = call.index_of(slot)
            call.spans.append((index, failed.start, failed.end))
            self._ended[call.lane, slot] = failed.end
            call.raised = (*call.raised, index)
            if failed.receipts:
                call.receipts = {**call.receipts, index: failed.receipts}
            poison = call.find_poison()
            error = poison or failure_error(self.link, call, slot, failure, body)
            # `CancelCall` is sent once per call, after the first rank's failure.
            if seq > hold.failed and seq not in hold.withdrawn:
                self.link.send(self.link.live_slots(), to_worker.CancelCall(seq))
            hold.withdrawn.add(seq)
            self._lower_failed(hold, seq)
            if failure.secondary and hold.root is None and poison is None:
                # A lost connection or resident is a consequence, and a report of the cause is still to come.
                hold.is_patient = hold.is_patient or failure.type in CAUSE_MAY_COME_LATE
                self._add_suspect(hold, call, error)
            elif seq > hold.failed and (hold.root or hold.suspected):
                hold.later.append((call, error, failure.secondary))
            else:
                self._fail_root_call(hold, call, error)

    def on_cancel_vote(self, slot: int, answer: from_worker.CancelVote) -> None:
        """Record a rank's vote on the withdrawal of a call. One refusal ends the vote."""
        request = self._withdrawals.add_answer(answer.token, slot, answer.can)
        if request is not None and not answer.can:
            self._withdrawals.drop_request(request)

    def on_heartbeat(self, slot: int, alive: from_worker.Heartbeat) -> None:
        """Record a rank's acknowledgement of a hold."""
        with self.lock:
            hold = self._holds.get(alive.lane)
            if hold is not None and hold.number == alive.number:
                hold.silent.discard(slot)
                self._check_suspicion(hold)

    def on_hold_reached(self, slot: int, held: from_worker.HoldReached) -> None:
        """Record that a rank has stopped in a hold."""
        with self.lock:
            hold = self._holds.get(held.lane)
            if hold is None or hold.number != held.number:
                return
            hold.waiting.discard(slot)
            hold.silent.discard(slot)
            hold.reports[slot] = held
            self.link.on_rank_halted(hold, slot, held.parts, True)
            if not hold.waiting and not self.link.on_all_halted(hold):
                self._finish_hold(hold)

    def start_phase(self, hold: Hold, what: str, within_s: float) -> None:
        """Start a phase of a hold, in which all stopped ranks do some work and wait again. The caller holds the lock.

        `finish_phase` follows for each rank.

        Args:
            hold: The hold in which all ranks have stopped.
            what: Description of the work, for errors.
            within_s: Timeout in seconds.
        """
        hold.waiting, hold.phase = set(self.link.live_slots()), (what, within_s)
        if hold.timer is not None:
            hold.timer.cancel()
        self._start_timer(hold, within_s)

    def finish_phase(
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
                self.link.fail_group(error(hold.cause()))
            elif not hold.waiting:
                self._finish_hold(hold)

    def on_worker_exited(self, slot: int) -> None:
        """Record a rank's exit, so that no hold or vote waits for the rank any more."""
        self._withdrawals.on_party_gone(slot, ColocateError(f"worker {slot} has ended"))
        with self.lock:
            for hold in self._holds.values():
                hold.waiting.discard(slot)
                hold.silent.discard(slot)

    def fail_all(self, error: ColocateError) -> bool:
        """Fail every pending call with one error; return whether there was a call."""
        with self.lock:
            calls = list(self.pending.values())
            for lane in {call.lane for call in calls}:
                self._note_stragglers(lane, [call for call in calls if call.lane == lane], set())
            for call in calls:
                self._remove_call(call, error)
                call._set_error(error)
            self._forget_holds()
            return bool(calls)

    def hold_all_lanes(self, background: Iterable[str] = ()) -> None:
        """Stop all ranks by a hold, to end the work of an earlier driver before any new call.

        Args:
            background: The group's background roles.
        """
        with self.lock:
            for lane in ("", *background):
                self._start_hold(self.link.base, known=None, cut=True, lane=lane)

    # -- the hold

    def _forget_holds(self) -> None:
        for hold in self._holds.values():
            if hold.timer is not None:
                hold.timer.cancel()
        self._holds.clear()

    def _start_hold(self, failed: int, known: int | None, cut: bool = False, lane: str = "") -> Hold:
        live = self.link.live_slots()
        hold = Hold(self._resumed.get(lane, self.link.base) + 1, lane, failed, set(live), set(live) - {known})
        hold.withdrawn.add(failed)
        self._holds[lane] = hold
        self._start_timer(hold, self.link.grace)
        # The failed rank gets the hold, too, because another async call there may wait for peers.
        self.link.send(live, to_worker.Hold(hold.number, failed, cut, lane))
        return hold

    def _lower_failed(self, hold: Hold, seq: int) -> None:
        if seq < hold.failed:
            hold.failed = seq
            self.link.send(self.link.live_slots(), to_worker.Hold(hold.number, seq, False, hold.lane))

    def _fail_root_call(self, hold: Hold, call: PendingCall, error: ColocateError) -> None:
        if hold.root is None or call.seq <= hold.failed:
            hold.root = error
        earlier = itertools.takewhile(lambda each: each.seq < call.seq, list(self.pending.values()))
        busy = {slot for each in earlier if each.lane == call.lane for slot in each.missing_slots()}
        self._note_stragglers(call.lane, [call], busy)
        self._remove_call(call, error)
        call._set_error(error)

    def _add_suspect(self, hold: Hold, call: PendingCall, error: ColocateError) -> None:
        if hold.suspected is not None:
            if hold.suspected[0] is call and hold.suspected[1]._is_consequence and not error._is_consequence:
                hold.suspected = call, error  # The new error isn't a mere consequence, so it says more.
            else:
                hold.later.append((call, error, True))
            return
        hold.suspected = call, error
        self._timers.call_later(ALIVE_WITHIN_S, lambda: self._settle_suspicion(hold))
        self._check_suspicion(hold)

    def _check_suspicion(self, hold: Hold) -> None:
        if not hold.silent and not hold.is_patient:
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
                self._fail_root_call(hold, call, call.find_poison() or error)

    def _finish_hold(self, hold: Hold) -> None:
        self._settle_suspicion(hold)
        if hold.suspected is not None:
            hold.later.append((*hold.suspected, True))
        for later, error, follows in sorted(hold.later, key=lambda item: item[0].seq):
            if not later.done():
                error = later.find_poison() or later_error(error, hold.root, follows)
                self._remove_call(later, error)
                later._set_error(error)
        if hold.timer is not None:
            hold.timer.cancel()
        self.link.report_unfinished(hold.reports)
        self._resumed[hold.lane] = hold.number
        del self._holds[hold.lane]
        self.link.send(self.link.live_slots(), to_worker.Resume(hold.number, sorted(hold.withdrawn), hold.lane))

    def _start_timer(self, hold: Hold, seconds: float) -> None:
        hold.armed_at = time.time()
        hold.timer = self._timers.call_later(seconds, lambda: self._on_overdue(hold))

    def _on_overdue(self, hold: Hold) -> None:
        with self.lock:
            if self._holds.get(hold.lane) is not hold:
                return
            if (stood := self.link.paused_seconds(hold.armed_at)) > 0.0:
                self._start_timer(hold, stood)
                return
            # A rank that still runs an earlier call isn't stuck, because calls have no deadline by default.
            earlier = [call for seq, call in list(self.pending.items()) if seq < hold.failed]
            busy = {
                slot
                for other in earlier
                if other.lane == hold.lane or other.is_for_all
                for slot in other.missing_slots()
            }
            stuck = sorted(hold.waiting - busy)
            if not stuck:
                self._start_timer(hold, self.link.grace)
                return
        self.stacks.ask_stacks(stuck, lambda found: self._fail_stuck_group(hold, stuck, found))

    def _fail_stuck_group(self, hold: Hold, stuck: list[int], stacks: Stacks) -> None:
        with self.lock:
            still = [slot for slot in stuck if slot in hold.waiting]
            if self._holds.get(hold.lane) is hold and still:
                self.link.fail_group(
                    hung_error(self.link, still[0], hold.phase, hold.cause(), stacks.describe_slot(still[0]))
                )

    # -- deadlines

    def on_timeout(self, ref: weakref.ref[PendingCall], timeout: float) -> None:
        """Fail a call that has exceeded the timeout, unless the call is settled or was never sent."""
        call = ref()
        if call is None or call.done() or call.seq < 0:
            return
        if (stood := self.link.paused_seconds(call.submitted)) > 0.0:
            remaining_s = call.submitted + timeout + stood - time.time()
            if remaining_s > 0.0:
                call.timer = self._timers.call_later(remaining_s, partial(self.on_timeout, ref, timeout))
                return
        self.stacks.ask_stacks(call.missing_slots(), lambda found: self._time_out_call(call, timeout, found))

    def _time_out_call(self, call: PendingCall, timeout: float, stacks: Stacks) -> None:
        with self.lock:
            if not call.done():
                by_slot = {slot: stacks.describe_slot(slot) for slot in call.missing_slots()}
                self.abort_call(call, timeout_error(self.link, call, timeout, by_slot))

    def abort_call(self, call: PendingCall, error: ColocateError) -> None:
        """Fail a call that may be running, and stop all ranks as after a failure."""
        with self.lock:
            if call.done():
                return
            if call.seq < 0:  # The call hasn't been sent yet.
                self.drop_call(call, error)
                return
            hold = self._holds.get(call.lane)
            if hold is None:
                hold = self._start_hold(call.seq, known=None, cut=True, lane=call.lane)
            elif hold.phase is None:  # In a phase no call runs, and the ranks' work mustn't be interrupted.
                self._lower_failed(hold, call.seq)
                live = self.link.live_slots()
                self.link.send(live, to_worker.CancelCall(call.seq))
                self.link.send(live, to_worker.Hold(hold.number, hold.failed, True, hold.lane))
            hold.withdrawn.add(call.seq)
            if hold.suspected is not None and hold.suspected[0].seq < call.seq:
                self._settle_suspicion(hold)  # A later call can't be the cause of an earlier failure.
            self._fail_root_call(hold, call, error)

    def is_held(self, lane: str) -> bool:
        return lane in self._holds

    def find_running_slots(self) -> set[int]:
        """Return the slots that still run a call which was running at the last stack report."""
        with self.lock:
            missing = {seq: call.missing_slots() for seq, call in list(self.pending.items())}
            return {slot for slot, ran in self.stacks.ran.items() if any(slot in missing.get(seq, ()) for seq in ran)}

    def find_owing_slots(self) -> set[int]:
        """Return the slots with unfinished calls."""
        with self.lock:
            return {slot for call in list(self.pending.values()) for slot in call.missing_slots()}

    def oldest_calls(self, slot: int | None = None) -> list[PendingCall]:
        """Return the oldest unfinished call of each lane, on the given slot or on any slot."""
        calls: dict[str, PendingCall] = {}
        for call in list(self.pending.values()):
            if call.lane not in calls and (slot is None or slot in call.missing_slots()):
                calls[call.lane] = call
        return [*calls.values()]

    def _report_call_end(self, slot: int, seq: int, told: Mapping[str, Any]) -> None:
        failed = chain.from_iterable(hold.failures for hold in self._holds.values())
        for call in filter(
            None, (self.pending.get(seq), *(failed_call for failed_call in failed if failed_call.seq == seq))
        ):
            self.link.on_call_report(call, slot, told)

    def _note_stragglers(self, lane: str, calls: Iterable[PendingCall], busy: set[int]) -> None:
        """Record for each failed call the ranks that still run the call, and when each rank began.

        Args:
            lane: The lane of the calls.
            calls: The calls, in order.
            busy: Slots that run other calls.
        """
        pairs: list[tuple[PendingCall, int]] = []
        if (hold := self._holds.get(lane)) is not None:
            busy |= set(self.link.live_slots()) - hold.waiting  # These ranks have stopped, and run no call.
            pairs = [(other, index) for other in hold.failures for index, _ in other.stragglers]
        for call in calls:
            slots = call.missing_slots()
            # These slots still run an earlier failed call.
            failed = {other.targets[index] for other, index in pairs if other.seq < call.seq}
            running = [slot for slot in slots if slot not in busy and slot not in failed]
            ended = [self._ended.get((lane, slot), 0.0) for slot in running]
            call.stragglers = [
                (call.index_of(slot), max(call.submitted, since)) for slot, since in zip(running, ended, strict=True)
            ]
            busy.update(slots)

    def _remove_call(self, call: PendingCall, error: BaseException | None) -> None:
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

    def ask_stacks(self, slots: list[int], then: Callable[[Stacks], None]) -> None:
        """Ask ranks for their stacks, and call `then` with the answers on the timers' thread, in a bounded time."""
        stacks = Stacks()

        def over() -> None:
            stacks.answers.update(dict.fromkeys(filter(self._link.has_left, slots), HAS_LEFT))
            stacks.answers.update(request.answers)
            self._timers.call_soon(lambda: then(stacks))

        with self._lock:
            responders = [slot for slot in slots if not self._link.has_left(slot)]
            request = self._requests.open(responders)
            request.add_callback(over)
            if responders:
                self._timers.call_later(SILENT_AFTER_S, lambda: self._inspect_silent(request, stacks))
                self._timers.call_later(STACKS_WITHIN_S, lambda: self._requests.drop_request(request))
                self._link.send(responders, to_worker.AskStack(request.token))

    def on_stack(self, slot: int, answer: from_worker.Stack) -> None:
        """Record a rank's stack."""
        with self._lock:
            self.ran[slot] = answer.running
        self._requests.add_answer(answer.token, slot, answer.text)

    def start_generation(self) -> None:
        """Reset the state for new workers. The caller holds the lock."""
        self._requests = Requests(self._link.base)
        self.ran.clear()

    def _inspect_silent(self, request: Request[int, str], found: Stacks) -> None:
        def seen(slot: int, what: str | None) -> None:
            if what is not None:
                found.outside_views[slot] = what

        if not request.is_over:
            for slot in request.owing:
                self._link.inspect_worker(slot, partial(seen, slot))
