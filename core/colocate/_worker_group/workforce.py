"""Start, watch and end the workers of one generation of a group."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from colocate._calls.failures import broken_error, death_error, failure_error, worker_error
from colocate._calls.order import Stacks
from colocate._calls.pending import PendingCall
from colocate._definitions.bundles import Table
from colocate._owned.owned import State
from colocate._plugins.needs import imports_of
from colocate._protocol import from_worker, to_worker, versions
from colocate._protocol.message import Head, Message, decode_head
from colocate._protocol.requests import Request as Question, Requests
from colocate._system.deadline import NEVER, Deadline
from colocate._system.jobs import Timer
from colocate._system.limits import AFTER_END_S, AFTER_FORCE_S, AFTER_KILL_S, IDLE_S, LOOKS_FOR_S, STACKS_WITHIN_S
from colocate._worker_group.spawn import pack_builds, start_error
from colocate.errors import ClusterError, ColocateError, RoleError, WorkerDied
from colocate.executor import Boot, Detachable, Exit, Host, Place
from colocate.worker.serving.output import Tail, get_log_levels, split_label

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup


class Stage(enum.IntEnum):
    """The stage that a worker has reached. Stages only increase, and may be skipped."""

    STARTING = 0  # The driver hasn't received a message yet.
    RUNNING = 1  # The driver has received the worker's first message.
    BUILT = 2  # All roles are constructed, or a constructor has failed.
    LEAVING = 3  # The worker runs no more role code, and exits by itself.
    GONE = 4  # The process has exited, or was never started.


class Stages:
    """Records the stages of a group's workers. The last worker to leave a stage wakes the waiting threads."""

    def __init__(self, slots: int) -> None:
        self._news = threading.Condition()
        self._stages = [Stage.STARTING] * slots
        self.numbers = [slots] + [0] * (len(Stage) - 1)  # Counts the workers in each stage.

    def advance(self, slot: int, stage: Stage) -> None:
        """Record a worker's stage, unless a later stage is already recorded."""
        with self._news:
            before = self._stages[slot]
            if stage > before:
                self._stages[slot] = stage
                self.numbers[stage] += 1
                self.numbers[before] -= 1
                if not self.numbers[before]:
                    self._news.notify_all()

    def all_reached(self, stage: Stage) -> bool:
        return not any(self.numbers[:stage])

    def slots_before(self, stage: Stage) -> set[int]:
        """Return the slots of workers that haven't reached a stage."""
        with self._news:
            return {slot for slot, reached in enumerate(self._stages) if reached < stage}

    def wake_waiters(self) -> None:
        """Wake the waiting threads, each of which checks the condition again."""
        with self._news:
            self._news.notify_all()

    def wait_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until a condition holds or the deadline is over; return whether the condition holds."""
        with self._news:
            return self._news.wait_for(ready, deadline.seconds_left)


class _NullHost(Host):
    """A placeholder for a worker's process before the launch, which discards all messages."""

    def send(self, frame: Any) -> None:
        """Discard the message, because no process is running yet."""

    def kill(self) -> None:
        """Do nothing, because no process is running yet."""


NOT_LAUNCHED = _NullHost()


@attrs.define(eq=False)
class Worker:
    """The driver's record of one worker process of a group.

    The executor calls the methods of `HostEvents`, on its receiving thread or on another one.

    Attributes:
        boot: The launch settings.
        hello: Facts from the worker's first message: pid, Python, colocate.
        exit: The exit; None while the worker runs.
        table: The definitions that the worker has.
        parts: The state of features, by feature name.
    """

    workforce: Workforce
    slot: int
    boot: Boot
    host: Host = NOT_LAUNCHED
    hello: Mapping[str, Any] | None = None
    exit: Exit | None = None
    lane_ended: bool = False
    table: Table = attrs.field(factory=lambda: Table("is given it"))
    progress: dict[str | None, tuple[float, float | None]] = attrs.field(factory=dict)
    parts: dict[str, Any] = attrs.field(factory=dict)
    _tail: Tail = attrs.field(factory=Tail)
    _questions: Requests[int, str | None] = attrs.field(factory=Requests[int, "str | None"])
    _address_request: Question[int, str | None] | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, if known."""
        if self.hello is not None:
            pid: int = self.hello["pid"]
            return pid
        return self.host.pid

    @property
    def state(self) -> str:
        if self.exit is not None:
            return "exited"
        return "running" if self.hello is not None else "starting"

    def send(self, message: Message) -> None:
        """Send a message to this worker only, unless the worker has exited."""
        if self.exit is None:
            executor = self.workforce.link.services.executor
            frame = executor.frame(message.head())
            self.host.send(frame)
            executor.discard(frame)

    def received(self, head: Head, body: Any) -> None:
        message, workforce = decode_head(head), self.workforce
        if isinstance(message, from_worker.CallEnded):
            if message.seq == 0:
                workforce.on_built(self.slot, None)
            else:
                workforce.order.on_call_done(self.slot, message, body)
            return
        match message:
            case from_worker.Progress():
                self.progress[message.role] = message.done, message.total
            case from_worker.Hello():
                self.hello = message.facts
                # A worker from an earlier driver has all roles already.
                workforce.stages.advance(self.slot, Stage.BUILT if self.slot in workforce._built else Stage.RUNNING)
            case from_worker.Address():
                request = self._address_request
                assert request is not None
                if message.trouble:
                    with workforce.order.lock:
                        self._address_request = None  # A later request for the address may succeed.
                    self._questions.add_refusal(request.token, ClusterError(message.trouble))
                else:
                    self._questions.add_answer(request.token, self.slot, message.address)
            case from_worker.WorkerBroken():
                workforce.on_worker_broken(self, message.reason, message.log_tail)
            case from_worker.LaneClosed():
                self.lane_ended = True
                workforce.stages.advance(self.slot, Stage.LEAVING)
            case _:
                workforce.link.heard(self, message, body)

    def logged(self, line: str) -> None:
        """Print a line of the worker's output, with the printing role and rank if known."""
        label, text = split_label(line)
        self._tail.append(text)
        services = self.workforce.link.services
        if services.output_handler is not None and services.output_handler(self.boot, label, text):
            return
        text = text.removesuffix("\r")
        source = f"{self.boot.group}/{label}" if label is not None else f"{self.boot.group} {self.slot}"
        services.printer.print_line(f"[{source}] {text}")

    def exited(self, exit: Exit) -> None:
        tail = "\n".join(self._tail).removesuffix("\r") or None
        self.exit = attrs.evolve(exit, log_tail=exit.log_tail or tail)
        self._questions.fail_all(ClusterError("the worker has ended"))
        self.workforce.on_worker_exited(self)

    @property
    def last_lines(self) -> Sequence[str]:
        return tuple(self._tail)

    @property
    def address(self) -> str | None:
        """The address by which other workers reach this worker, if known."""
        request = self._address_request
        return None if request is None else request.answers.get(self.slot)

    def locate(self, then: Callable[[str | None, str], None]) -> None:
        """Request the address by which other workers reach this worker.

        Then call `then` with the address, or with None and the reason.
        """
        with self.workforce.order.lock:
            request = self._address_request
            if request is None:
                request = self._address_request = self._questions.open([self.slot])
                self.send(to_worker.Listen())

        def answered() -> None:
            if request.error is not None:
                then(None, str(request.error))
            else:
                then(request.answers.get(self.slot) if self.exit is None else None, "it is gone")

        request.add_callback(answered)


class Workforce:
    """Starts, watches and ends the workers of a group."""

    def __init__(self, link: WorkerGroup, places: Sequence[Place]) -> None:
        self.link = link
        self.order = link.order
        self.stages = Stages(len(places))
        self._lock = threading.Lock()  # No other lock is taken while this lock is held.
        self._built: dict[int, ColocateError | None] = {}
        self._build_failed = False
        self._granted, self.overdue = 0.0, NEVER
        self._stacks_asked = False  # Becomes True with the first request for stack traces.
        self._stacks: Stacks | None = None
        self._timers: list[Timer] = []
        self._building_since: float | None = None
        self.began = time.time()
        services, request = link.services, link.home.request
        generation = f"@{link.generation}" if link.generation else ""
        levels = get_log_levels()
        self.workers = [
            Worker(
                self,
                slot,
                Boot(
                    worker=f"{services.id}/{link.name}{generation}/{slot}",
                    group=link.name,
                    slot=slot,
                    node=place.node,
                    device=place.device,
                    cpus=request.cpus / request.groups,
                    env=request.env,
                    secret=services.secret,
                    path=services.path,
                    host=place.host,
                    strict=services.strict,
                    generation=link.generation,
                    log_levels=levels,
                    ports=request.ports,
                    cut_s=request.cut_s,
                ),
            )
            for slot, place in enumerate(places)
        ]
        self._places = places

    # -- start

    def launch_workers(self) -> None:
        """Start the workers and construct the roles.

        Raises:
            RoleStartError: A worker didn't start, or a role wasn't constructed; all workers are ended.
        """
        group, declared = self.link, self.link.declared
        deadline, executor = Deadline(group.start_timeout), group.services.executor
        generation, parts = group.generation, group.builds()
        body = pack_builds(declared, executor.codec, group.name, group.seed, generation, executor.in_process, parts)
        self._launch()
        if self._wait_reached(Stage.RUNNING, deadline):
            self._compare_versions()
        if not self._built:
            self._construct(body, deadline)
        if group.closed_by is not None:
            group.check_usable()
        if errors := self._start_errors():
            raise start_error(group.name, errors)

    def _launch(self) -> None:
        group, executor, declared = self.link, self.link.services.executor, self.link.declared
        imports = () if executor.in_process else imports_of(info.cls for info in declared.infos.values())
        for worker, place in zip(self.workers, self._places, strict=True):
            worker.boot = attrs.evolve(worker.boot, imports=imports, env={**worker.boot.env, **declared.env})
            try:
                worker.host = executor.launch(place, worker.boot, worker)
            except ColocateError:
                raise
            except Exception as why:
                words = f"could not be started: {type(why).__name__}: {why}"
                failed = worker_error(RoleError, group, worker.slot, None, words)
                failed.__cause__ = why
                raise start_error(group.name, {worker.slot: failed}) from why
            group.greet(worker)
            # Another thread may have closed the group, and no longer waits for this worker.
            if group.closed_by is not None:
                worker.host.kill()
                group.check_usable()

    def _compare_versions(self) -> None:
        here = versions.own_facts()
        for worker in self.workers:
            if (unlike := versions.describe_mismatch(here, worker.hello or here)) is not None:
                self.on_built(worker.slot, worker_error(RoleError, self.link, worker.slot, worker.pid, unlike))

    def _construct(self, body: Any, deadline: Deadline) -> None:
        """Construct the roles in all workers, and wait until all are constructed or one has failed."""
        group = self.link
        build = to_worker.Build(
            group.generation,
            len(self.workers),
            group.services.collective_timeout,
            group.told(lambda part: part.worker_config()),
            group.told(lambda part: part.ready_configs()),
            group.background,
        )
        group.send(group.live_slots(), build, body)
        self._building_since = began = time.time()
        while not self.stages.wait_until(lambda: self.stages.all_reached(Stage.BUILT) or self._build_failed, deadline):
            if (stood := group.paused_seconds(began)) <= 0.0:
                break
            began, deadline = time.time(), Deadline(stood)
        if self._build_failed:
            # A hold notifies the other ranks, which get the same time to stop as after any failed call.
            if group.closed_by is None:
                self._granted = group.grace
            self._wait_reached(Stage.BUILT, Deadline(group.grace))

    def _start_errors(self) -> dict[int, ColocateError]:
        errors: dict[int, ColocateError] = {}
        for worker in self.workers:
            error = self._built.get(worker.slot)
            late = worker.slot not in self._built
            if late and not (self._build_failed and worker.hello is not None):
                what = "did not start" if worker.hello is None else "did not construct its roles"
                error = worker_error(RoleError, self.link, worker.slot, worker.pid, f"{what} in time")
                self._granted = self.link.start_timeout or 0.0
            if error is not None:
                errors[worker.slot] = error
        return errors

    def find_starting(self, longer_than: float) -> list[int]:
        """Return the slots of workers that have been starting for more than `longer_than` seconds."""
        return sorted(self.stages.slots_before(Stage.BUILT)) if time.time() - self.began > longer_than else []

    def find_constructing(self, longer_than: float) -> list[int]:
        """Return the slots of workers that have been constructing roles for more than `longer_than` seconds."""
        since = self._building_since
        if since is None or time.time() - since - self.link.paused_seconds(since) <= longer_than:
            return []
        return sorted(self.stages.slots_before(Stage.BUILT))

    def adopt_workers(self, executor: Detachable, tokens: Sequence[bytes]) -> None:
        """Take over an earlier driver's workers, which have constructed all roles."""
        for worker, place, token in zip(self.workers, self._places, tokens, strict=True):
            self._built[worker.slot] = None
            worker.host = executor.adopt_worker(place, worker.boot, worker, token)
            self.link.greet(worker)

    def wait_hello(self, grace: float) -> list[int]:
        """Wait for the first message or the end of each worker; return the slots of late workers."""
        if not self._wait_reached(Stage.RUNNING, Deadline(grace)):
            # This process may have been suspended, so handle the messages that have arrived in the meantime.
            self._wait_reached(Stage.RUNNING, Deadline(LOOKS_FOR_S))
        return sorted(self.stages.slots_before(Stage.RUNNING))

    def on_built(self, slot: int, error: ColocateError | None) -> None:
        """Record that a worker's constructors have finished, or that one has failed with an error."""
        self._built.setdefault(slot, error)
        if error is not None and not self._build_failed:
            self._build_failed = True
            self.stages.wake_waiters()
        self.stages.advance(slot, Stage.BUILT)

    def on_build_failed(self, slot: int, failure: from_worker.Failure, body: Any) -> None:
        role = failure.role
        call = PendingCall(
            f"the constructor of {role}", role or "", "__init__", [worker.slot for worker in self.workers]
        )
        self.on_built(slot, failure_error(self.link, call, slot, failure, body))

    def _wait_reached(self, stage: Stage, deadline: Deadline) -> bool:
        return self.stages.wait_until(lambda: self.stages.all_reached(stage), deadline)

    def _wait_or_hurry(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until a condition holds or the grace period is cut short; return whether the condition holds."""
        self.stages.wait_until(lambda: self.link.is_hurried or ready(), deadline)
        return ready()

    def mark_ready(self) -> None:
        """Mark the group as ready, and look for workers that have died since their roles were constructed."""
        self.link.on_workers_ready()
        self.recheck_exits()

    def recheck_exits(self) -> None:
        """Handle workers' exits that were ignored in an earlier state of the group."""
        for worker in self.workers:
            if worker.exit is not None:
                self.on_worker_exited(worker)

    # -- while it runs

    def on_worker_broken(self, worker: Worker, reason: str, log_tail: str) -> None:
        """Handle a worker that has become unusable and is about to exit."""
        error = broken_error(self.link, worker.slot, worker.pid, reason, log_tail)
        if self.link.life.is_starting:
            self.on_built(worker.slot, error)
        else:
            self._fail_group(error)

    def on_worker_exited(self, worker: Worker) -> None:
        """Handle the exit of a worker, which fails a ready group."""
        assert worker.exit is not None
        link, slot = self.link, worker.slot
        link.gone(worker)
        self.order.on_worker_exited(slot)
        if link.life.is_starting:
            running = "the constructors of its roles" if worker.hello is not None else None
            self.on_built(slot, death_error(link, slot, worker.pid, worker.exit, running))
        elif link.life.state is State.READY:
            with self.order.lock:
                first = [call.label for call in self.order.oldest_calls(slot)]
            self._fail_group(death_error(link, slot, worker.pid, worker.exit, " and ".join(first) or None))
        self.stages.advance(slot, Stage.GONE)

    def _fail_group(self, error: WorkerDied) -> None:
        if self.link.life.state is State.READY:
            self.link.fail_group(error)
            self.link.services.notify_observers("colocate_worker_died", error)

    def kill_workers(self) -> None:
        for worker in self.workers:
            if worker.exit is None:
                worker.host.kill()

    def wait_exited(self) -> bool:
        """Wait until all workers have exited after `kill_workers`; return whether all have exited."""
        self._note_unlaunched()
        return self._wait_reached(Stage.GONE, Deadline(AFTER_KILL_S))

    def wait_lost(self) -> None:
        """Wait until all workers have exited after the loss of a slot, which ends the whole group."""
        self._wait_reached(Stage.GONE, Deadline(AFTER_KILL_S))

    def _note_unlaunched(self) -> None:
        for worker in self.workers:
            if worker.host is NOT_LAUNCHED:
                self.stages.advance(worker.slot, Stage.GONE)

    # -- the end

    def end_workers(self, grace: float) -> list[BaseException]:
        """End all workers: wait up to `grace` seconds for running calls, then kill the rest; return the errors."""
        link = self.link
        errors: list[BaseException] = []
        if (failure := link.life.unreported_failure()) is not None:
            errors.append(failure)
        self._note_unlaunched()
        try:
            link.send(link.live_slots(), to_worker.Close(f"group {link.name!r} is closing"))
            errors += self._wait_for_lanes(grace)
            hung = self.stages.slots_before(Stage.LEAVING)
            # Kill hung workers first, because other workers may wait for answers or processor time.
            for slot in hung:
                self.workers[slot].host.kill()
            within = AFTER_FORCE_S if hung else AFTER_END_S
            self.stages.wait_until(lambda: not self.stages.numbers[Stage.LEAVING], Deadline(within))
        finally:
            for timer in self._timers:
                timer.cancel()
            self.kill_workers()
            self._wait_reached(Stage.GONE, Deadline(AFTER_KILL_S))
        errors += [
            ColocateError(f"worker {slot} of group {link.name!r} (pid {self.workers[slot].pid}) did not go when killed")
            for slot in sorted(self.stages.slots_before(Stage.GONE))
        ]
        return errors

    def _wait_for_lanes(self, grace: float) -> list[BaseException]:
        """Wait until all lanes have ended, for at most `grace` seconds; return an error for each late worker.

        The grace period is for running calls. An idle lane gets a moment to end in any case.
        """
        deadline, idle_until = Deadline(grace), Deadline(max(grace, IDLE_S))
        first = deadline.get_earlier(self.overdue)
        early = self._stacks_asked  # Stack traces may have been requested before this close began.
        if self._wait_or_hurry(self._is_idle, first.move_earlier(STACKS_WITHIN_S)):
            return []
        # Request stack traces now, because a stopped rank never answers, and a longer wait would exceed the deadline.
        self._ask_stacks()
        if self._wait_or_hurry(self._is_idle, first):
            return []
        hung = self._find_hung(deadline)
        if early and self._stacks is not None:
            self._ask_stacks_again(hung, deadline.move_earlier(STACKS_WITHIN_S / 2))
        if self._wait_or_hurry(lambda: self._busy_slots() <= hung, idle_until) and self._is_idle():
            return []
        # The failure was reported already, or nobody waits for the errors.
        if self.link.failure is not None or self.link.is_hurried:
            return []
        if self._building_since is None and not self._built:  # No user code has run in the workers.
            return []
        self.stages.wait_until(lambda: self._stacks is not None, Deadline(2 * STACKS_WITHIN_S))
        stacks, allowed = self._stacks or Stacks(), self._granted or grace
        return [
            worker_error(
                RoleError,
                self.link,
                w.slot,
                w.pid,
                f"did not end within {allowed:g} s and was ended; it was here:\n{stacks.describe_slot(w.slot)}",
            )
            for w in (self.workers[slot] for slot in sorted(self._busy_slots()))
            if w.hello is not None  # The start's error has reported workers that didn't start.
        ]

    def _busy_slots(self) -> set[int]:
        return self.stages.slots_before(Stage.LEAVING)

    def _is_idle(self) -> bool:
        return self.stages.all_reached(Stage.LEAVING)

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """Record that the owner's grace period ends at `deadline`, even if this group is closed later."""
        self._granted = max(self._granted, grace)
        self.overdue = self.overdue.get_earlier(deadline)
        wait_s = deadline.move_earlier(STACKS_WITHIN_S).seconds_left or 0.0
        self._timers.append(self.link.services.timers.call_later(wait_s, self._ask_stacks))

    def _ask_stacks_again(self, hung: set[int], at: Deadline) -> None:
        """Request the stack traces again if ranks that were idle at the first request haven't ended since."""
        if not self._wait_or_hurry(lambda: self._busy_slots() <= hung, at):
            with self._lock:
                self._stacks_asked, self._stacks = False, None
            self._ask_stacks()

    def _ask_stacks(self) -> None:
        """Request the stack traces of all ranks that haven't ended; do nothing if requested before."""
        with self._lock:
            was_asked, self._stacks_asked = self._stacks_asked, True

        def looked(stacks: Stacks) -> None:
            self._stacks = stacks
            self.stages.wake_waiters()

        if not was_asked:
            self.order.stacks.ask_stacks(sorted(self._busy_slots()), looked)

    def _find_hung(self, deadline: Deadline) -> set[int]:
        """Return the slots that still run calls, or don't answer, at the end of the owner's grace period.

        Idle slots get more time. As long as no stacks have arrived, all slots with pending answers count.
        """
        self._wait_or_hurry(lambda: self._stacks is not None or self._is_idle(), deadline)
        stacks, busy = self._stacks, self._busy_slots()
        silent = set() if stacks is None else busy - stacks.answers.keys()
        running = self.order.find_owing_slots() if stacks is None else self.order.find_running_slots()
        constructing = (
            self.stages.slots_before(Stage.BUILT) if self._building_since is not None or self._built else set[int]()
        )
        return busy & (silent | running | constructing)
