"""Both halves of order and hold on one thread: N ranks under random schedules, failures, deadlines and deaths.

The driver's half is `CallOrder` with the features' `Pauses` and `GroupsOfGroup`, the worker's is `LaneOrder` with
`Scope` and `UsableGroups`: the real code. This module adds the lanes between them (one of a background role), a
worker's reaction to each message, and a model of process groups: operations are counted, a rank that waits in vain
cuts the group, and a cut group is useless (`features/process_groups`). Roles renew dropped groups together, or can't;
some programs train: a rank that raises between the operation and the update leaves the ranks with different
models. A seed determines each next step, so that a run can be repeated.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import attrs

from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._protocol import from_worker, to_worker
from colocate._protocol.requests import Request
from colocate.errors import CallCancelled, CallTimeout, ColocateError, RenewalError, WorkerDied
from colocate.features.pausing.messages import Pause, PauseAfter, PauseBegun, ResumeRole, RoleAtRest
from colocate.features.pausing.pauses import Pauses
from colocate.features.process_groups.driver import NAME, GroupsOfGroup
from colocate.features.process_groups.messages import DropGroups, GroupsDropped, LeftGroups, RankReport
from colocate.features.process_groups.usable import UsableGroups
from colocate.worker import lane_order
from colocate.worker.lane_order import LaneOrder
from colocate.worker.serving.scope import Scope

RANKS = 3
SLOTS = {"all": tuple(range(RANKS)), "two": (0, RANKS - 1)}
BESIDE = "beside"  # the background role, on all slots
GRACE_S = 10.0
STEPS = 20_000  # An upper bound; most programs take some hundred.


class BrokenLaw(AssertionError):
    """A law is broken."""


@attrs.frozen
class Plan:
    """The script of one call.

    Attributes:
        role: Its role.
        kind: "plain", "meet" (in an operation of the role's process group), "overlapping" (async, two at once), or
            "everywhere" (in the orders of all lanes).
        targets: Its slots.
        fails: The slots on which it raises.
        late: Whether it raises after the operation.
        timeout: Whether its timeout may expire at any moment.
        cancel: Whether it is cancelled at some moment.
    """

    role: str
    kind: str
    targets: Sequence[int]
    fails: Sequence[int] = ()
    late: bool = False
    timeout: bool = False
    cancel: bool = False


@attrs.define(eq=False)
class Work:
    """A call on a rank."""

    is_barrier: ClassVar[bool] = False
    seq: int
    plan: Plan
    concurrency: int
    on_drop: Callable[[], None] | None = None
    is_abandoned: bool = False
    steps: int = 0  # Completed steps of a background role's call.
    rests: bool = False  # Whether it stands at a pause point.
    arrived: tuple[str, int, int] | None = None  # Its operation: group, instance, number.
    updates: int = 0  # beginnings and ends of updates of its role's model

    def drop_call(self) -> None:
        """Report that the call will never begin."""
        if self.on_drop is not None:
            self.on_drop()


class Stand(Work):
    """A lane's entry for a call that runs on another lane."""

    is_barrier = True


@attrs.define(order=True)
class Timer:
    """A job for later."""

    due: float
    number: int
    job: Callable[[], object] = attrs.field(order=False)
    cancelled: bool = attrs.field(default=False, order=False)

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """A clock that advances when nothing else happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[Timer] = []
        self._soon: deque[Callable[[], object]] = deque()

    def call_soon(self, job: Callable[[], object]) -> None:
        """Queue a job to run next."""
        self._soon.append(job)

    def call_later(self, delay_s: float, job: Callable[[], object]) -> Timer:
        """Schedule a job."""
        timer = Timer(self.now + delay_s, len(self._coming), job)
        heapq.heappush(self._coming, timer)
        return timer

    def jobs(self) -> bool:
        """Run the next queued job; return whether there was one."""
        if not self._soon:
            return False
        self._soon.popleft()()
        return True

    def go_on(self) -> bool:
        """Advance the clock to the next job and run it; return whether there was one."""
        while self._coming:
            timer = heapq.heappop(self._coming)
            if not timer.cancelled:
                self.now = timer.due
                timer.job()
                return True
        return False


class Lane:
    """One lane of a rank."""

    def __init__(self, rank: PlayedRank, name: str) -> None:
        self.rank, self.name = rank, name
        self.order: Any = LaneOrder(rank.scope)
        self.queue: deque[Any] = deque()
        self.taken: Work | None = None
        self.computing: list[Work] = []  # The last one computes; another may begin at a pause point.
        self.tasks: dict[int, Work] = {}
        self.journal: list[int] = []
        self.order_of_all: list[int] = []  # Includes other lanes' calls during which it stood still.

    def step(self) -> bool:
        """Do one thing; return False if the lane waits."""
        order, tasks = self.order, self.tasks
        if not self.name and self.rank.renewing is not None:
            return self.rank.renew(*self.rank.renewing)
        if self.computing and not self.computing[-1].rests:
            return self.rank.go_on(self, self.computing[-1])
        if (taken := self.taken) is not None:
            self.taken = None
            self._begin(taken)
            return True
        runs = len(tasks) + len(self.computing)
        if not runs and order.is_clear:
            if self.queue:
                self._take(self.queue.popleft())
                return True
            return False
        stands = bool(self.computing) and self.computing[-1].is_barrier
        work = None if stands else order.pop_next_barrier(runs) if self.computing else order.pop_next(runs)
        if work is not None:
            self._take(work)
            return True
        if (back := order.take_hold_report(runs)) is not None:
            self.rank.is_back(self, *back)
            return True
        if (pause := order.take_rest_report(runs)) is not None:
            pause.on_rest()
            return True
        if self.queue:
            item = self.queue.popleft()
            if isinstance(item, Work):
                order.handle_item(item)
            else:
                self._take(item)
            return True
        # A computing call has the lane's thread, so async calls don't continue meanwhile.
        going = [work for work in self.computing[-1:] or tasks.values() if not (work.rests and self.stays(work))]
        return bool(going) and self.rank.go_on(self, self.rank.world.random.choice(going))

    def stays(self, work: Work) -> bool:
        """Return whether a call stays at its pause point, or stands still for another lane's call."""
        return work.seq not in self.rank.over if work.is_barrier else self.order.is_pausing and not work.is_abandoned

    def _take(self, item: Any) -> None:
        if isinstance(item, Work):
            self.taken = item  # Messages may arrive before the call begins.
        elif isinstance(item, tuple):  # The caller no longer waits for this call.
            for work in (*self.tasks.values(), *self.computing):
                work.is_abandoned = work.is_abandoned or (work.seq == item[0] and (work.concurrency > 0 or work.rests))
        elif isinstance(item, DropGroups):
            self.rank.drop(item)
        else:
            self.order.handle_item(item)

    def _begin(self, work: Work) -> None:
        runs = [each for each in (*self.tasks.values(), *self.computing) if not (each.rests and work.is_barrier)]
        if not self.order.begin_call(work, len(self.tasks) + len(self.computing)):
            return
        if len(runs) >= max(1, work.concurrency):
            raise BrokenLaw(f"call {work.seq} has begun on slot {self.rank.slot} beside {[each.seq for each in runs]}")
        self.order_of_all.append(work.seq)
        if not work.is_barrier and work.seq not in self.journal[-1:]:  # Unless the call was put back.
            self.journal.append(work.seq)
        if work.concurrency:
            self.tasks[work.seq] = work
        else:
            self.computing.append(work)

    def end(self, work: Work) -> None:
        """Remove a finished call."""
        self.go_from(work)
        self.tasks.pop(work.seq, None)
        if work in self.computing:
            self.computing.remove(work)
        del self.order.running[work.seq]

    def rest(self, work: Work) -> None:
        """Stop a call at a pause point."""
        work.rests = True
        if work.is_barrier:
            self.order.barrier_calls += 1
        else:
            self.order.paused_calls += 1

    def go_from(self, work: Work) -> None:
        """Resume a call that stands at a pause point."""
        if work.is_barrier:
            self.order.barrier_calls -= work.rests
        else:
            self.order.paused_calls -= work.rests
        work.rests = False


class PlayedRank:
    """One worker: its lanes, and its process groups."""

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot = world, slot
        self.scope = Scope(self._lane_of)
        self.lanes = {name: Lane(self, name) for name in ("", BESIDE)}
        self.missing: dict[int, int] = {}  # Lanes that don't stand still yet, for a call in all lanes.
        self.over: set[int] = set()  # Calls in all lanes that are over.
        self.received_definitions: deque[Any] = deque()
        self.outbox: deque[Any] = deque()
        # By process group: its instance and begun operations. By role: updates of its model.
        self.begun: dict[str, tuple[int, int]] = {}
        self.usable = UsableGroups()
        self.renewing: tuple[int, deque[str]] | None = None  # The hold, and the roles that must renew their groups.
        self.updates = dict.fromkeys(SLOTS, 0)

    def _lane_of(self, seq: int) -> str:
        work = self.lanes[BESIDE].order.running.get(seq)
        return "" if work is None or work.is_barrier else BESIDE

    # -- messages

    def receive(self) -> bool:
        """Process the next message, like the receiving thread; return whether there was one."""
        if not self.received_definitions:
            return False
        message = self.received_definitions.popleft()
        lane = self.lanes[getattr(message, "lane", "")]
        if isinstance(message, Work):
            self._receive(message)
        elif isinstance(message, to_worker.Hold):
            self.outbox.append(from_worker.Heartbeat(message.number, message.lane))
            item = lane.order.hold(message.number, message.failed)
            lane.queue += [(message.failed,), item]
            self.scope.end_waits(message.failed, "a call has failed", message.lane)
            if message.cut and not message.lane and any(seq >= message.failed for seq in lane.order.running):
                self._cut(name for name, (_, count) in self.begun.items() if count)
        elif isinstance(message, LeftGroups):
            self.usable.on_peer_left(message.number, message.slot, message.operations)
        elif isinstance(message, DropGroups):
            self.scope.resume_waits()
            lane.queue.append(message)
        elif isinstance(message, to_worker.Resume):
            self.scope.resume_waits(message.lane)
            lane.queue.append(lane_order.Resume(message.number, frozenset(message.withdrawn)))
        elif isinstance(message, to_worker.CancelCall):
            for each in self.lanes.values():
                each.queue.append((message.seq,))
        elif isinstance(message, to_worker.OfferCancel):
            can = lane.order.defer_call(message.token, message.seq)
            self.outbox.append(from_worker.CancelVote(message.token, can))
        elif isinstance(message, to_worker.CancelDecision):
            lane.queue.append(lane_order.Decision(message.token, message.seq if message.drop else None))
        elif isinstance(message, Pause):
            self.outbox.append(PauseBegun(message.token, lane.order.pause(message.token)))
        elif isinstance(message, PauseAfter):
            rests = partial(self.outbox.append, RoleAtRest(message.token))
            lane.queue.append(lane_order.Pause(message.number, message.last, message.keeps, rests))
        elif isinstance(message, ResumeRole):
            lane.queue.append(lane_order.EndPause(message.number))
        elif isinstance(message, to_worker.AskStack):
            running = tuple(seq for each in self.lanes.values() for seq in each.order.running)
            self.outbox.append(from_worker.Stack(message.token, "", running))
        else:
            raise TypeError(message)
        return True

    def _receive(self, work: Work) -> None:
        lane = self.lanes[BESIDE if work.plan.role == BESIDE else ""]
        if work.plan.kind == "everywhere":
            self.missing[work.seq] = 1
            work.on_drop = partial(self.over.add, work.seq)
            self.lanes[BESIDE].queue.append(Stand(work.seq, work.plan, 0))
        lane.queue.append(work)

    # -- what a lane runs

    def step(self) -> bool:
        """Advance one lane; return False if none can advance."""
        lanes = [*self.lanes.values()]
        self.world.random.shuffle(lanes)
        return any(lane.step() for lane in lanes)

    def is_back(self, lane: Lane, number: int, begun: int) -> None:
        """Report that a lane is idle in a hold."""
        if lane.name:
            self.outbox.append(from_worker.HoldReached(number, begun, {}, lane.name))
            return
        self.usable.on_back(number)
        told = RankReport(operations=self.operations(), cuts=sorted(self.usable.cuts))
        self.outbox.append(from_worker.HoldReached(number, begun, _parts(told)))

    def drop(self, message: DropGroups) -> None:
        """Drop process groups, and set the roles that must renew theirs."""
        whose = [name for name, slots in SLOTS.items() if self.slot in slots]
        for name in message.names:
            self.begun.pop(name, None)
        self.usable.cuts.update(message.names)
        self.renewing = message.number, deque(name for name in whose if message.everybody or name in message.names)

    def renew(self, hold: int, roles: deque[str]) -> bool:
        """Continue the renewal of roles; return False if one waits for its peers."""
        failure = None
        while roles and failure is None:
            how = self.world.renewals[roles[0]]
            if how == "again" and roles[0] not in self.begun and not self._makes(roles[0], None):
                return False  # The peers arrive, or the group fails.
            if how == "raises" and self.slot == RANKS - 1:
                failure = from_worker.Failure("Boom", f"renewal of {roles[0]}", "", False, False, roles[0], None)
            roles.popleft()
        if failure is None:
            self.usable.cuts.clear()
        self.renewing = None
        self.outbox.append(GroupsDropped(hold, [], failure))
        return True

    def go_on(self, lane: Lane, work: Work) -> bool:
        """Continue a running call; return False if it waits."""
        plan = work.plan
        fails = self.slot in plan.fails
        if work.is_barrier:
            if work.rests:
                lane.end(work)
            else:
                self.missing[work.seq] = 0
                lane.rest(work)
            return True
        if plan.kind == "everywhere" and not self._all_stand(lane, work):
            return False
        if lane.name:
            if not work.rests and lane.stays(work):
                lane.rest(work)
                return True
            lane.go_from(work)
            if self.world.is_paused and not work.is_abandoned:
                raise BrokenLaw(f"call {work.seq} goes on on slot {self.slot} though its role is paused")
            if not work.is_abandoned and work.steps < 2:
                work.steps += 1
                return True
        if work.seq not in lane.order.running:
            pass  # The call was put back.
        elif work.is_abandoned:
            self._fail(work, secondary=True)
        elif fails and not plan.late:
            self._fail(work)
        elif plan.kind == "meet" and not self._meets(work):
            return False
        elif work.seq not in lane.order.running:
            pass  # The call has failed in the operation.
        elif fails:
            self._fail(work)
        else:
            self._update(work)
            self.outbox.append(
                from_worker.CallEnded(
                    work.seq, None, 0.0, 0.0, None, _parts(RankReport(work.updates, begins=work.arrived is not None))
                )
            )
            lane.end(work)
            self.over.add(work.seq)
        return True

    def _all_stand(self, lane: Lane, work: Work) -> bool:
        """Return whether a call in all lanes advances: all lanes stand still, or the call was put back."""
        if self.missing[work.seq] and self.scope.get_wait_refusal(work.seq) is not None:
            del lane.order.running[work.seq]
            lane.computing.remove(work)
            lane.order_of_all.remove(work.seq)
            lane.order.put_back(work)
            return True
        goes_on = [each.seq for each in self.lanes[BESIDE].order.running.values() if not each.rests]
        if not self.missing[work.seq] and goes_on:
            raise BrokenLaw(f"{work.seq} is done on slot {self.slot} while {goes_on} go on")
        return not self.missing[work.seq]

    def _fail(self, work: Work, secondary: bool = False) -> None:
        lane = self.lanes[BESIDE if work.plan.role == BESIDE else ""]
        groups = not lane.name
        lost = secondary or (groups and (bool(self.usable.cuts) or any(map(self._is_broken, self.begun))))
        kind = "colocate._protocol.consequence.Consequence" if secondary else "Boom"
        failure = from_worker.Failure(kind, f"{work.seq} on {self.slot}", "", False, lost, work.plan.role, None)
        told = RankReport(work.updates, self.operations() if groups else {}, work.arrived is not None)
        self.outbox.append(from_worker.Failed(work.seq, failure, _parts(told), 0.0, 0.0, (), lane.name))
        lane.order.on_failed(work)
        lane.end(work)
        self.over.add(work.seq)

    # -- process groups

    def operations(self) -> dict[str, tuple[int, int]]:
        """Return for each group the number of begun operations and of ranks."""
        return {name: (count, len(SLOTS[name])) for name, (_, count) in self.begun.items()}

    def _meets(self, work: Work) -> bool:
        """Advance a call in its role's operation; return False while peers are missing."""
        name = work.plan.role
        if name not in self.begun and not (made := self._makes(name, work.seq)):
            if made is False:
                self._fail(work, secondary=True)
            return made is False
        if work.arrived is None:
            instance, count = self.begun[name]
            self.begun[name] = instance, count + 1
            work.arrived = name, instance, count
            there = self.world.meetings.setdefault(work.arrived, {})
            there[self.slot] = work.seq
            self.world.arrivals += 1
            if len(set(there.values())) > 1:
                raise BrokenLaw(f"an operation of {name} has paired different calls: {there}")
        if not self.world.waits or len(self.world.meetings[work.arrived]) == len(SLOTS[name]):
            return True  # All ranks have sent their data, which arrives even if a rank cuts the group now.
        self._free_those_that_wait()
        if self._is_broken(name):
            self._fail(work, secondary=True)
            return True
        return False

    def _makes(self, name: str, seq: int | None) -> bool | None:
        """Make a group with all its ranks; return None while ranks are missing, False if it fails."""
        there = self.world.making.setdefault((name, self.usable.epoch), set())
        self.world.arrivals += self.slot not in there
        there.add(self.slot)
        if None not in there and there >= set(SLOTS[name]):
            self.begun[name] = self.usable.epoch, 0
            return True
        if None in there or self.scope.get_wait_refusal(seq) is not None:
            there.add(None)  # The other ranks can't make the group either.
            return False
        return None

    def _update(self, work: Work) -> None:
        """Update the role's model after the operation, in programs that train."""
        if self.world.trains and work.arrived is not None:
            work.updates = 2
            self.updates[work.plan.role] += 1

    def _is_broken(self, name: str) -> bool:
        instance, _ = self.begun[name]
        return (name, instance) in self.world.cut

    def _free_those_that_wait(self) -> None:
        self._cut(self.usable.find_hopeless(self.operations(), SLOTS.__getitem__))

    def _cut(self, names: Iterable[str]) -> None:
        new = set(names) - self.usable.cuts
        self.world.arrivals += len(new)
        self.usable.cuts |= new
        self.world.cut.update((name, self.begun[name][0]) for name in new)


def _parts(told: RankReport) -> dict[str, Any]:
    """Return a rank's report on process groups in its wire format."""
    plain = told.encode()
    return {} if plain is None else {NAME: plain}


class Link(SimpleNamespace):
    """The parts of a group that `CallOrder` needs."""

    def __init__(self, world: World, timers: Timers) -> None:
        super().__init__(
            name="simulated",
            size=RANKS,
            base=0,
            grace=GRACE_S,
            generation=0,
            forked=False,
            closed_by=None,
            services=SimpleNamespace(timers=timers, dispatcher=timers),
        )
        self.world = world

    def on_rank_halted(self, hold: Any, slot: int, told: Mapping[str, Any], is_back: bool) -> None:
        """Forward the report of a halted rank."""
        self.world.groups.on_rank_halted(hold, slot, told.get(NAME), is_back)

    def on_call_report(self, call: PendingCall, slot: int, told: Mapping[str, Any]) -> None:
        """Forward the report on a finished call."""
        if NAME in told:
            self.world.groups.on_call_report(call, slot, told[NAME])

    def report_unfinished(self, back: Any) -> None:
        pass

    def on_all_halted(self, hold: Any) -> bool:
        """Drop groups, if there are any to drop."""
        return self.world.groups.on_all_halted(hold)

    def send(self, slots: Sequence[int], message: Any, body: Any = None) -> None:
        if isinstance(message, to_worker.Resume) and not message.lane:
            check_groups(self.world)
        for slot in slots:
            self.world.ranks[slot].received_definitions.append(message)

    def live_slots(self) -> list[int]:
        return [rank.slot for rank in self.world.ranks if rank.slot not in self.world.dead]

    def paused_seconds(self, since: float) -> float:
        """Return 0: no rank is ever stopped."""
        return 0.0

    def has_left(self, slot: int) -> bool:
        """Return whether a rank is dead."""
        return slot in self.world.dead

    def inspect_worker(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Answer None: ranks can't be inspected."""
        then(None)

    def node(self, slot: int) -> str:
        return "here"

    def fail_group(self, error: ColocateError) -> None:
        """Fail the group and all its calls."""
        self.world.failure = self.world.failure or error
        self.world.order.fail_all(error)
        self.world.pauses.fail_requests(error)


class World:
    """A group under one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.timers = Timers()
        self.dead: set[int] = set()
        self.failure: ColocateError | None = None
        self.meetings: dict[tuple[str, int, int], dict[int, int]] = {}
        self.making: dict[tuple[str, int], set[int | None]] = {}
        self.cut: set[tuple[str, int]] = set()
        kinds = random.Random(f"renewals {seed}")  # A generator of its own keeps the drawn programs the same.
        self.renewals = {name: kinds.choice(["no", "no", *["again"] * 7, "raises"]) for name in SLOTS}
        self.trains = kinds.random() < 0.2
        self.waits = kinds.random() < 0.8  # Whether calls wait for the operations that they begin.
        self.arrivals = 0  # Progress of waiting ranks that others wait for.
        self.ranks = [PlayedRank(self, slot) for slot in range(RANKS)]
        self.link: Any = Link(self, self.timers)
        self.order = self.link.order = CallOrder(cast("Any", self.link))
        self.groups = GroupsOfGroup(cast("Any", self.link))
        self.pauses = Pauses(self.order)
        self.is_paused = False
        self.plans: dict[int, tuple[Plan, PendingCall]] = {}
        self.late: list[PendingCall] = []  # Calls that may time out at any moment.
        self.cancelled: set[int] = set()

    # -- what happens

    def submit(self, plan: Plan) -> PendingCall:
        """Send a call in one step, like both ways of sending."""
        call = PendingCall(f"{plan.role}.{plan.kind}", plan.role, plan.kind, plan.targets)
        call.lane, call.is_for_all = plan.role if plan.role == BESIDE else "", plan.kind == "everywhere"
        with self.order.lock:
            seq = self.order.enqueue_call(call)
            self.plans[seq] = plan, call
            for slot in plan.targets:
                self.ranks[slot].received_definitions.append(Work(seq, plan, 2 if plan.kind == "overlapping" else 0))
        if plan.timeout:
            self.late.append(call)
        return call

    def hear(self, rank: PlayedRank) -> bool:
        """Process a rank's next message on the driver; return whether there was one."""
        if not rank.outbox or rank.slot in self.dead:
            return False
        message, slot, order = rank.outbox.popleft(), rank.slot, self.order
        if isinstance(message, from_worker.CallEnded):
            order.on_call_done(slot, message, None)
        elif isinstance(message, from_worker.Failed):
            order.on_call_failed(slot, message, None)
        elif isinstance(message, from_worker.Heartbeat):
            order.on_heartbeat(slot, message)
        elif isinstance(message, from_worker.HoldReached):
            order.on_hold_reached(slot, message)
        elif isinstance(message, GroupsDropped):
            self.groups.on_message(cast("Any", SimpleNamespace(slot=slot)), message, None)
        elif isinstance(message, from_worker.CancelVote):
            order.on_cancel_vote(slot, message)
        elif isinstance(message, PauseBegun | RoleAtRest):
            self.pauses.on_answer(slot, message)
        elif isinstance(message, from_worker.Stack):
            order.stacks.on_stack(slot, message)
        else:
            raise TypeError(message)
        return True

    def kill(self, slot: int) -> None:
        """Kill a rank, which fails its group."""
        self.dead.add(slot)
        self.order.on_worker_exited(slot)
        self.link.fail_group(WorkerDied(f"worker {slot} is gone"))

    def cancel(self, call: PendingCall) -> None:
        self.cancelled.add(call.seq)
        self.order.cancel_call(call)

    def pause(self, how: str) -> None:
        """Pause the background role, or resume it if it is paused."""
        try:
            if self.is_paused:
                self.is_paused = False
                self.pauses.resume_role(BESIDE)
            else:
                self.pauses.pause_role(BESIDE, how, None)
                self.is_paused = True
        except (WorkerDied, RenewalError):
            pass

    def time_out(self) -> bool:
        """Time out a call; return whether there was one."""
        calls = [call for call in self.late if not call.done()]
        if not calls:
            return False
        call = self.random.choice(calls)
        self.late.remove(call)
        self.order.abort_call(call, CallTimeout(f"{call.label} is late"))
        return True

    def happen(self) -> bool:
        """Take one step; return False if only time can pass."""
        doings: list[Callable[[], bool]] = [self.timers.jobs]
        for rank in self.ranks:
            if rank.slot not in self.dead:
                doings += [rank.receive, rank.step]
            doings.append(lambda rank=rank: self.hear(rank))  # type: ignore[misc]
        self.random.shuffle(doings)
        arrivals = self.arrivals
        return any(doing() for doing in doings) or self.arrivals > arrivals

    def settle(self) -> None:
        """Run until nothing is left to do, or the group has failed."""
        for _ in range(STEPS):
            if self.failure is not None or not (self.happen() or self.timers.go_on()):
                return
            if self.random.random() < 0.02:
                self.time_out()
        raise BrokenLaw("it has no end")


def draw(rng: random.Random) -> list[Plan]:
    """Draw a program; one in two has a background role and calls in all lanes."""
    plans, background = [], rng.random() < 0.5
    for _ in range(rng.randint(2, 10)):
        role = rng.choice([*SLOTS, *[BESIDE] * background])
        kind = rng.choice(["plain", "overlapping"] if role == BESIDE else ["plain", "meet", "meet", "overlapping"])
        if background and rng.random() < 0.2:
            role, kind = "all", "everywhere"
        slots = SLOTS.get(role, SLOTS["all"])
        targets = slots if kind in ("meet", "everywhere") else sorted(rng.sample(slots, rng.randint(1, len(slots))))
        fails = rng.choice([(), (), (), (rng.choice(targets),), tuple(targets)])
        plans.append(Plan(role, kind, targets, fails, rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.1))
    return plans


def run(seed: int) -> None:
    """Run one program, and check the laws.

    Raises:
        BrokenLaw: A law doesn't hold.
    """
    world = World(seed)
    rng, plans = world.random, deque(draw(world.random))
    deadly = rng.random() < 0.1
    waits: Any = Request  # A wait runs everything else meanwhile.
    original = waits.wait_over
    try:
        waits.wait_over = lambda request, timeout=None: _pump(world, request)
        while plans and world.failure is None:
            draws = rng.random()
            if draws < 0.25:
                world.submit(plans.popleft())
            elif draws < 0.28:
                world.time_out()
            elif draws < 0.30:
                _cancel_one(world)
            elif draws < 0.302 and deadly:
                world.kill(rng.randrange(RANKS))
            elif draws < 0.32:
                world.pause(rng.choice(["wait", "keep", "abort"]))
            else:
                world.happen()
        if world.is_paused:
            world.pause("")
        world.settle()
        check(world)
        if world.failure is None:
            check_that_it_goes_on(world)
    finally:
        waits.wait_over = original


def _pump(world: World, request: Request[Any, Any]) -> bool:
    for _ in range(STEPS):
        if request.is_over or not (world.happen() or world.timers.go_on()):
            return request.is_over
    raise BrokenLaw("a question has no answer")


def _cancel_one(world: World) -> None:
    calls = [call for plan, call in world.plans.values() if plan.cancel and call.seq not in world.cancelled]
    if calls:
        world.cancel(world.random.choice(calls))


def check(world: World) -> None:
    """Check the laws of a finished program."""
    if world.failure is not None and not world.dead and not is_renewal_error(world):
        raise BrokenLaw(f"the group has failed: {world.failure}")
    for rank in world.ranks:
        for lane in rank.lanes.values():
            its = [
                seq for seq, (plan, call) in world.plans.items() if rank.slot in plan.targets and call.lane == lane.name
            ]
            if lane.journal != sorted(set(lane.journal)) or not set(lane.journal) <= set(its):
                raise BrokenLaw(f"slot {rank.slot} has begun {lane.journal} of {its} on lane {lane.name!r}")
    check_one_order([rank.lanes[BESIDE].order_of_all for rank in world.ranks])
    troubled = False  # whether an earlier call has failed
    for seq, (plan, call) in world.plans.items():
        if not call.done():
            raise BrokenLaw(f"call {seq} has no end: {plan}")
        error = call._error
        begun = [slot for slot in plan.targets if seq in world.ranks[slot].lanes[call.lane].journal]
        if error is None:
            if plan.fails or begun != list(plan.targets):
                raise BrokenLaw(f"call {seq} went well though it was begun on {begun}: {plan}")
        elif not isinstance(error, WorkerDied | RenewalError):
            has_reason = (
                (plan.fails and set(begun) & set(plan.fails))
                or (plan.timeout and isinstance(error, CallTimeout))
                or (plan.cancel and isinstance(error, CallCancelled) and not begun)
                or (plan.kind == "meet" and begun and troubled)
                or (call.lane and "aborted" in str(error))
            )
            if not has_reason:
                raise BrokenLaw(f"call {seq} had no reason to fail: {error!r}: {plan}")
        troubled = troubled or (isinstance(error, ColocateError) and not isinstance(error, CallCancelled))


def is_renewal_error(world: World) -> bool:
    """Return whether a `renew` that raised, or different models, explain the group's failure."""
    if not isinstance(world.failure, RenewalError):
        return False
    if world.failure.method == "renew":
        return "raises" in world.renewals.values()
    return bool(diverged(world))


def diverged(world: World) -> list[str]:
    """Return the roles whose ranks have made different numbers of updates."""
    return [role for role, slots in SLOTS.items() if len({world.ranks[slot].updates[role] for slot in slots}) > 1]


def check_groups(world: World) -> None:
    """Check that after a hold all ranks have the same groups, operation counts and models, and no cut group."""
    ranks = [rank for rank in world.ranks if rank.slot not in world.dead]
    for name, slots in SLOTS.items():
        found = {rank.begun.get(name) for rank in ranks if rank.slot in slots}
        if len(found) > 1:
            raise BrokenLaw(f"after a hold ranks have different groups of {name}, or are at different places: {found}")
        for instance, _ in filter(None, found):
            if (name, instance) in world.cut:
                raise BrokenLaw(f"after a hold ranks go on with {name}, which one of them has cut")
    if any(rank.usable.cuts for rank in ranks):
        raise BrokenLaw(f"after a hold ranks take groups for cut: {[rank.usable.cuts for rank in ranks]}")
    if roles := diverged(world):
        raise BrokenLaw(f"after a hold ranks go on with different models of {roles}")


def check_one_order(orders: Sequence[Sequence[int]]) -> None:
    """Check that any two ranks have their common calls in the same order."""
    for one in orders:
        for other in orders:
            both = set(one) & set(other)
            if [seq for seq in one if seq in both] != [seq for seq in other if seq in both]:
                raise BrokenLaw(f"ranks have different orders: {one} and {other}")


def check_that_it_goes_on(world: World) -> None:
    """Check that later calls succeed on all ranks."""
    for role, slots in [*SLOTS.items(), (BESIDE, SLOTS["all"])]:
        for kind in ("plain", "overlapping") if role == BESIDE else ("plain", "meet", "overlapping", "everywhere"):
            if kind == "everywhere" and role != "all":
                continue
            call = world.submit(Plan(role, kind, slots))
            world.settle()
            if not call.done() or call._error is not None:
                raise BrokenLaw(f"a later call of {role}.{kind} has not gone well: {call._error!r}")
