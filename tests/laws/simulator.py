"""Both halves of order and hold on one thread: N ranks under random schedules, failures, deadlines and deaths.

The driver's half is `CallOrder` with `Cancellations`, the worker's is `LaneOrder` with `Scope`, as they are. Here are
the lanes between them, what a worker does about each message, and process groups, as far as it matters who waits for
whom: operations are counted, whoever waits in vain cuts, what is cut is of no use (`worker/torch_groups`). What
happens next is drawn from a seed, which is enough to have it happen again.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs

from colocate._calls.cancel import Cancellations
from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._protocol import from_worker, to_worker
from colocate._protocol.requests import Request
from colocate.errors import CallCancelled, CallTimeout, ColocateError, WorkerDied
from colocate.worker import lane_order
from colocate.worker.lane_order import LaneOrder
from colocate.worker.serving.scope import Scope

RANKS = 3
SLOTS = {"all": tuple(range(RANKS)), "two": (0, RANKS - 1)}
GRACE_S = 10.0
STEPS = 20_000  # in which all of a program has happened; most take some hundred


class BrokenLaw(AssertionError):
    """What mustn't be has been."""


@attrs.frozen
class Plan:
    """What a call is to do.

    Attributes:
        role: Whose it is.
        kind: "plain", "meet" (in an operation of the role's process group), or "overlapping" (async, two at once).
        targets: The slots that it goes to.
        fails: Those on which it raises.
        late: Whether it raises after it has met.
        timeout: Whether its time may be over at any moment.
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

    seq: int
    plan: Plan
    concurrency: int
    on_drop: Callable[[], None] | None = None
    given_up: bool = False
    arrived: tuple[str, int, int] | None = None  # at which operation: group, instance, number


@attrs.define(order=True)
class Timer:
    """A job for later."""

    due: float
    number: int
    job: Callable[[], object] = attrs.field(order=False)
    cancelled: bool = attrs.field(default=False, order=False)

    def cancel(self) -> None:
        """It isn't done any more."""
        self.cancelled = True


class Timers:
    """A clock that goes on when nothing else happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[Timer] = []
        self._soon: deque[Callable[[], object]] = deque()

    def soon(self, job: Callable[[], object]) -> None:
        """Do something next."""
        self._soon.append(job)

    def after(self, delay_s: float, job: Callable[[], object]) -> Timer:
        """Do something later."""
        timer = Timer(self.now + delay_s, len(self._coming), job)
        heapq.heappush(self._coming, timer)
        return timer

    def jobs(self) -> bool:
        """Do what is to be done next; whether there was something."""
        if not self._soon:
            return False
        self._soon.popleft()()
        return True

    def go_on(self) -> bool:
        """Have the clock go on to the next job; whether there was one."""
        while self._coming:
            timer = heapq.heappop(self._coming)
            if not timer.cancelled:
                self.now = timer.due
                timer.job()
                return True
        return False


class Rank:
    """One worker: its lane, and its process groups."""

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot = world, slot
        self.scope = Scope()
        self.order: LaneOrder[Work] = LaneOrder(self.scope)
        self.received_definitions: deque[Any] = deque()
        self.outbox: deque[Any] = deque()
        self.queue: deque[Any] = deque()
        self.taken: Work | None = None
        self.computing: Work | None = None
        self.tasks: dict[int, Work] = {}
        self.journal: list[int] = []
        # Process groups: operations begun on each, by its name and instance; which are cut here.
        self.begun: dict[str, tuple[int, int]] = {}
        self.cut: set[str] = set()
        self.gone: dict[int, Any] = {}
        self.epoch = 0

    # -- messages

    def receive(self) -> bool:
        """Take the next message, as the thread that receives does; whether there was one."""
        if not self.received_definitions:
            return False
        message = self.received_definitions.popleft()
        if isinstance(message, Work):
            self.queue.append(message)
        elif isinstance(message, to_worker.Hold):
            self.outbox.append(from_worker.Alive(message.number))
            item = self.order.hold(message.number, message.failed)
            self.queue += [(message.failed,), item]
            self.scope.end(message.failed, "a call has failed")
            if message.cut and any(seq >= message.failed for seq in self.order.running):
                self._cut([name for name, (_, count) in self.begun.items() if count])
        elif isinstance(message, to_worker.Left):
            if message.number > self.epoch:
                self.gone[message.slot] = message.operations
        elif isinstance(message, to_worker.DropGroups):
            self.scope.resume()
            self.queue.append(message)
        elif isinstance(message, to_worker.Resume):
            self.scope.resume()
            self.queue.append(lane_order.Resume(message.number, frozenset(message.withdrawn)))
        elif isinstance(message, to_worker.Unwanted):
            self.queue.append((message.seq,))
        elif isinstance(message, to_worker.Withdraw):
            can = self.order.hold_up(message.token, message.seq)
            self.outbox.append(from_worker.CanWithdraw(message.token, can))
        elif isinstance(message, to_worker.Decided):
            self.queue.append(lane_order.Decided(message.token, message.seq if message.drop else None))
        elif isinstance(message, to_worker.AskStack):
            self.outbox.append(from_worker.Stack(message.token, "", tuple(self.order.running)))
        else:
            raise TypeError(message)
        return True

    # -- the lane

    def step(self) -> bool:
        """Do one thing on the lane; False where it waits."""
        order, tasks = self.order, self.tasks
        if self.computing is not None:
            return self._go_on(self.computing)
        if (taken := self.taken) is not None:
            self.taken = None
            self._begin(taken)
            return True
        if not tasks and order.is_plain:
            if self.queue:
                self._take(self.queue.popleft())
                return True
            return False
        if (work := order.next(len(tasks))) is not None:
            self._take(work)
            return True
        if (back := order.back(len(tasks))) is not None:
            number, begun = back
            self.epoch = number
            self.gone.clear()
            self.outbox.append(from_worker.Held(number, begun, self.operations(), sorted(self.cut)))
            return True
        if self.queue:
            item = self.queue.popleft()
            if isinstance(item, Work):
                order.note(item)
            else:
                self._take(item)
            return True
        return bool(tasks) and self._go_on(self.world.random.choice(list(tasks.values())))

    def _take(self, item: Any) -> None:
        if isinstance(item, Work):
            self.taken = item  # something may be heard before it begins
        elif isinstance(item, tuple):  # nobody waits for it any more
            if (work := self.tasks.get(item[0])) is not None:
                work.given_up = True
        elif isinstance(item, to_worker.DropGroups):
            for name in item.names:
                self.begun.pop(name, None)
            self.cut.clear()
            self.outbox.append(from_worker.GroupsDropped(item.number, [], None))
        else:
            self.order.note(item)

    def _begin(self, work: Work) -> None:
        if not self.order.begins(work, len(self.tasks)):
            return
        if len(self.tasks) >= max(1, work.concurrency):
            raise BrokenLaw(f"call {work.seq} has begun on slot {self.slot} beside {[*self.tasks]}")
        self.journal.append(work.seq)
        if work.concurrency:
            self.tasks[work.seq] = work
        else:
            self.computing = work

    def _go_on(self, work: Work) -> bool:
        """Go on with a call that runs; False where it waits."""
        plan = work.plan
        fails = self.slot in plan.fails
        if work.given_up:
            self._fail(work, secondary=True)
        elif fails and not plan.late:
            self._fail(work)
        elif plan.kind == "meet" and not self._meets(work):
            return False
        elif work.seq not in self.order.running:
            pass  # it has failed where it met
        elif fails:
            self._fail(work)
        else:
            self.outbox.append(from_worker.Done(work.seq, None, 0.0, 0.0, None, 0))
            self._end(work)
        return True

    def _end(self, work: Work) -> None:
        self.tasks.pop(work.seq, None)
        self.computing = None
        del self.order.running[work.seq]

    def _fail(self, work: Work, secondary: bool = False) -> None:
        lost = secondary or bool(self.cut) or any(self._is_broken(name) for name in self.begun)
        kind = "colocate._protocol.consequence.Consequence" if secondary else "Boom"
        failure = from_worker.Failure(kind, f"{work.seq} on {self.slot}", "", False, lost, work.plan.role, None)
        self.outbox.append(from_worker.Failed(work.seq, failure, self.operations(), 0, False, 0.0, 0.0))
        self.order.failed(work)
        self._end(work)

    # -- process groups

    def operations(self) -> dict[str, tuple[int, int]]:
        """How many operations it has begun on each, and how many ranks that has."""
        return {name: (count, len(SLOTS[name])) for name, (_, count) in self.begun.items()}

    def _meets(self, work: Work) -> bool:
        """Have a call go on in an operation of its role's group; False where its peers aren't there yet."""
        name = work.plan.role
        if name not in self.begun and not self._makes(work, name):
            return work.seq not in self.order.running
        if work.arrived is None:
            instance, count = self.begun[name]
            self.begun[name] = instance, count + 1
            work.arrived = name, instance, count
            there = self.world.meetings.setdefault(work.arrived, {})
            there[self.slot] = work.seq
            self.world.arrivals += 1
            if len(set(there.values())) > 1:
                raise BrokenLaw(f"an operation of {name} has paired different calls: {there}")
        if len(self.world.meetings[work.arrived]) == len(SLOTS[name]):
            return True  # all have sent what the others need: it arrives even where they cut the group after that
        self._free_those_that_wait()
        if self._is_broken(name):
            self._fail(work, secondary=True)
            return True
        return False

    def _makes(self, work: Work, name: str) -> bool:
        """Make a group with all its ranks, or none; False while they aren't there, or once the call has failed."""
        there = self.world.making.setdefault((name, self.epoch), set())
        self.world.arrivals += self.slot not in there
        there.add(self.slot)
        if None not in there and there >= set(SLOTS[name]):
            self.begun[name] = self.epoch, 0
            return True
        if None in there or self.scope.why(work.seq) is not None:
            there.add(None)  # the others don't make it either
            self._fail(work, secondary=True)
        return False

    def _is_broken(self, name: str) -> bool:
        instance, _ = self.begun[name]
        return (name, instance) in self.world.cut

    def _free_those_that_wait(self) -> None:
        vain = []
        for name, (_, count) in self.begun.items():
            told = [gone[name][0] if name in gone else 0 for slot, gone in self.gone.items() if slot in SLOTS[name]]
            if told and count > min(told):
                vain.append(name)
        self._cut(vain)

    def _cut(self, names: Sequence[str]) -> None:
        self.world.arrivals += not self.cut.issuperset(names)
        self.cut.update(names)
        self.world.cut.update((name, self.begun[name][0]) for name in names)


class Link(SimpleNamespace):
    """What `CallOrder` needs of its group."""

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

    def send(self, slots: Sequence[int], message: Any, body: Any = None) -> None:
        """Send a message to some ranks."""
        for slot in slots:
            self.world.ranks[slot].received_definitions.append(message)

    def live(self) -> list[int]:
        """Those that live."""
        return [rank.slot for rank in self.world.ranks if rank.slot not in self.world.dead]

    def has_left(self, slot: int) -> bool:
        """Whether one doesn't."""
        return slot in self.world.dead

    def look(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Nothing is seen from outside."""
        then(None)

    def node(self, slot: int) -> str:
        """Where a rank is."""
        return "here"

    def fail(self, error: ColocateError) -> None:
        """The group can't go on."""
        self.world.failure = self.world.failure or error
        self.world.order.fail_all(error)


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
        self.arrivals = 0  # how often a rank that waits has done what others wait for
        self.ranks = [Rank(self, slot) for slot in range(RANKS)]
        self.link: Any = Link(self, self.timers)
        self.order = CallOrder(cast("Any", self.link))
        self.cancellations = Cancellations(self.order)
        self.plans: dict[int, tuple[Plan, PendingCall]] = {}
        self.late: list[PendingCall] = []  # those whose time may be over at any moment
        self.cancelled: set[int] = set()

    # -- what happens

    def submit(self, plan: Plan) -> PendingCall:
        """Send a call: in one step, as both ways of sending one do."""
        call = PendingCall(f"{plan.role}.{plan.kind}", plan.role, plan.kind, plan.targets)
        with self.order.lock:
            seq = self.order.enter(call)
            self.plans[seq] = plan, call
            for slot in plan.targets:
                self.ranks[slot].received_definitions.append(Work(seq, plan, 2 if plan.kind == "overlapping" else 0))
        if plan.timeout:
            self.late.append(call)
        return call

    def hear(self, rank: Rank) -> bool:
        """Take a rank's next message, on the driver; whether there was one."""
        if not rank.outbox or rank.slot in self.dead:
            return False
        message, slot, order = rank.outbox.popleft(), rank.slot, self.order
        if isinstance(message, from_worker.Done):
            order.done(slot, message, None)
        elif isinstance(message, from_worker.Failed):
            order.failed(slot, message, None)
        elif isinstance(message, from_worker.Alive):
            order.alive(slot, message.number)
        elif isinstance(message, from_worker.Held):
            order.held(slot, message)
        elif isinstance(message, from_worker.GroupsDropped):
            order.renewed(slot, message, None)
        elif isinstance(message, from_worker.CanWithdraw):
            self.cancellations.answered(slot, message)
        elif isinstance(message, from_worker.Stack):
            order.stacks.answered(slot, message)
        else:
            raise TypeError(message)
        return True

    def kill(self, slot: int) -> None:
        """A rank ends: its group fails."""
        self.dead.add(slot)
        self.order.gone(slot)
        self.cancellations.gone(slot)
        self.link.fail(WorkerDied(f"worker {slot} is gone"))

    def cancel(self, call: PendingCall) -> None:
        """Cancel a call, while everything goes on."""
        self.cancelled.add(call.seq)
        self.cancellations.cancel(call)

    def time_out(self) -> bool:
        """A call's time is over; whether there was one."""
        calls = [call for call in self.late if not call.done()]
        if not calls:
            return False
        call = self.random.choice(calls)
        self.late.remove(call)
        self.order.break_off(call, CallTimeout(f"{call.label} is late"))
        return True

    def happen(self) -> bool:
        """Have one thing happen; False when nothing can but that time goes by."""
        doings: list[Callable[[], bool]] = [self.timers.jobs]
        for rank in self.ranks:
            if rank.slot not in self.dead:
                doings += [rank.receive, rank.step]
            doings.append(lambda rank=rank: self.hear(rank))  # type: ignore[misc]
        self.random.shuffle(doings)
        arrivals = self.arrivals
        return any(doing() for doing in doings) or self.arrivals > arrivals

    def settle(self) -> None:
        """Have everything happen, and time go by, until nothing is left; or the group has failed, and its ranks end."""
        for _ in range(STEPS):
            if self.failure is not None or not (self.happen() or self.timers.go_on()):
                return
            if self.random.random() < 0.02:
                self.time_out()
        raise BrokenLaw("it has no end")


def draw(rng: random.Random) -> list[Plan]:
    """A program."""
    plans = []
    for _ in range(rng.randint(2, 10)):
        role = rng.choice([*SLOTS])
        kind = rng.choice(["plain", "meet", "meet", "overlapping"])
        slots = SLOTS[role]
        targets = slots if kind == "meet" else sorted(rng.sample(slots, rng.randint(1, len(slots))))
        fails = rng.choice([(), (), (), (rng.choice(targets),), tuple(targets)])
        plans.append(Plan(role, kind, targets, fails, rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.1))
    return plans


def run(seed: int) -> None:
    """Run one program, and check the laws.

    Raises:
        BrokenLaw: One doesn't hold.
    """
    world = World(seed)
    rng, plans = world.random, deque(draw(world.random))
    deadly = rng.random() < 0.1
    waits: Any = Request  # whoever waits here has everything else happen meanwhile
    original = waits.wait
    try:
        waits.wait = lambda request, timeout=None: _pump(world, request)
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
            else:
                world.happen()
        world.settle()
        check(world)
        if world.failure is None:
            check_that_it_goes_on(world)
    finally:
        waits.wait = original


def _pump(world: World, request: Request[Any, Any]) -> bool:
    for _ in range(STEPS):
        if request.over or not (world.happen() or world.timers.go_on()):
            return request.over
    raise BrokenLaw("a question has no answer")


def _cancel_one(world: World) -> None:
    calls = [call for plan, call in world.plans.values() if plan.cancel and call.seq not in world.cancelled]
    if calls:
        world.cancel(world.random.choice(calls))


def check(world: World) -> None:
    """What holds of every program once it is over."""
    if world.failure is not None and not world.dead:
        raise BrokenLaw(f"the group has failed: {world.failure}")
    for rank in world.ranks:
        its = [seq for seq, (plan, _) in world.plans.items() if rank.slot in plan.targets]
        if rank.journal != sorted(set(rank.journal)) or not set(rank.journal) <= set(its):
            raise BrokenLaw(f"slot {rank.slot} has begun {rank.journal} of {its}")
    troubled = False  # whether an earlier call has failed
    for seq, (plan, call) in world.plans.items():
        if not call.done():
            raise BrokenLaw(f"call {seq} has no end: {plan}")
        error = call._error
        begun = [slot for slot in plan.targets if seq in world.ranks[slot].journal]
        if error is None:
            if plan.fails or begun != list(plan.targets):
                raise BrokenLaw(f"call {seq} went well though it was begun on {begun}: {plan}")
        elif not isinstance(error, WorkerDied):
            has_reason = (
                (plan.fails and set(begun) & set(plan.fails))
                or (plan.timeout and isinstance(error, CallTimeout))
                or (plan.cancel and isinstance(error, CallCancelled) and not begun)
                or (plan.kind == "meet" and begun and troubled)
            )
            if not has_reason:
                raise BrokenLaw(f"call {seq} had no reason to fail: {error!r}: {plan}")
        troubled = troubled or (isinstance(error, ColocateError) and not isinstance(error, CallCancelled))


def check_that_it_goes_on(world: World) -> None:
    """Later calls go well on all ranks."""
    for role, slots in SLOTS.items():
        for kind in ("plain", "meet", "overlapping"):
            call = world.submit(Plan(role, kind, slots))
            world.settle()
            if not call.done() or call._error is not None:
                raise BrokenLaw(f"a later call of {role}.{kind} has not gone well: {call._error!r}")
