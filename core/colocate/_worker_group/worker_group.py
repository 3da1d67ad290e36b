"""`WorkerGroup`: the workers of a group, and the state that all calls share."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from colocate import features
from colocate._calls.order import CallOrder
from colocate._calls.passing import plan_relays
from colocate._calls.pending import PendingCall
from colocate._calls.residents import Residents
from colocate._calls.services import Services
from colocate._calls.unasked import UnaskedLog
from colocate._owned.owned import Owned, State, raise_together
from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Message
from colocate._protocol.uses import Origin, Source
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._system.deadline import Deadline
from colocate._system.jobs import format_error, get_message, report_exception
from colocate._system.limits import BACKOFF_S, LONGEST_BACKOFF_S, RESTART_ENDS_WITHIN_S
from colocate._system.numbers import FOREVER_S
from colocate._system.threads import Thread
from colocate._values.mesh import Ranks
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.published import DefinitionPublisher, Questions
from colocate._worker_group.spawn import Declared, resize_roles, warn_of_rebound
from colocate._worker_group.workforce import Worker, Workforce
from colocate.errors import ClosedError, ClusterError, ColocateError, GroupRestarted, RoleStartError, WorkerDied
from colocate.executor import Place

if TYPE_CHECKING:
    from colocate._api.slots import Slots

_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class Attachment:
    """The terms under which this driver uses a pool that was detached before.

    Attributes:
        name: The pool's name in the cluster.
        is_owner: Whether the pool ends with this driver.
        ttl: Seconds that the pool exists without a driver.
        groups: Names of the groups that belong to the pool; other groups end with this driver.
        renew_lease: Updates the record of the pool's groups and their state for later drivers.
        lock: Keeps updates of the record in order.
    """

    name: str
    is_owner: bool
    ttl: float
    groups: set[str]
    renew_lease: Callable[[], None]
    lock: threading.Lock = attrs.field(factory=threading.Lock)


class Restarts:
    """The restarts of a failed group, in which all ranks are rebuilt together, up to a limited number of times.

    Pending calls and residents belonged to the failed generation: each use raises `GroupRestarted`. New calls are
    refused with the same error until somebody has called `group.wait_ready()`: the roles then have the state of the
    last checkpoint, and nobody continues from there by accident.
    """

    def __init__(self, group: WorkerGroup, limit: int) -> None:
        # The number of restarts allowed between two checkpoints; with 0, the first failure is final.
        self.limit = limit
        self._group = group
        self._used = 0
        self._missing: ColocateError | None = None  # Holds the reason why lost slots aren't replaced yet.
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what users see

    def check_noted(self) -> None:
        """Raise if the group has been restarted and no user has acknowledged the restart."""
        overcome = self._group.life.past_failure  # Read once, because another thread may acknowledge the restart.
        if overcome is not None:
            raise overcome.with_traceback(None)

    def wait_ready(self, timeout: float | None, notes: bool = True) -> str | int | float | None:
        """Wait until the group can be called again; return the tag of the roles' checkpoint.

        Args:
            timeout: Seconds to wait at most; None for ever.
            notes: Whether this wait acknowledges the restart, so that calls are accepted again.

        Raises:
            TimeoutError: The group isn't ready yet.
            ColocateError: The restart has failed, or the group is closed.
        """
        group = self._group
        group.check_open()  # This also raises in a forked child, where no restart runs.
        deadline = Deadline(timeout)
        while True:
            if not group.life.wait_settled(deadline.seconds_left):
                why = "" if self._missing is None else f", and waits for slots in place of lost ones: {self._missing}"
                raise TimeoutError(f"group {group.name!r} isn't ready after {timeout} s: it is {group.state}{why}")
            with group.order.lock:
                if not group.life.is_settled:  # The group has just failed again.
                    continue
                group.check_open()
                if (failure := group.life.take_failure()) is not None:
                    raise copy.copy(failure)
                if notes:
                    group.life.acknowledge_restart()
                return group.tag()

    def reset_attempts(self) -> None:
        """Reset the number of restarts, because there is a new checkpoint."""
        self._used = 0

    # -- when the group fails

    def prepare_restart(self, cause: ColocateError) -> ColocateError:
        """Handle the group's failure; return the error for users. The caller holds `CallOrder.lock`.

        The restart itself begins with `start_rebuild`, after users have received the error.
        """
        if self._used >= self.limit:
            return cause
        name, found_source = self._group.name, self._group.roles_source()
        more = ("detail", "running") if isinstance(cause, WorkerDied) else ()
        keys = [key for key in (*ColocateError.__annotations__, *more) if not key.startswith("_")]
        facts: dict[str, Any] = {key: getattr(cause, key) for key in keys}
        blamed = f"\n{words}" if (words := self._record_deaths([cause])) else ""
        source = "as constructed" if found_source is None else f"as of {found_source}"
        restart_error = GroupRestarted(
            f"{cause.message}{blamed}\ngroup {name!r} is being restarted, with its roles {source}: "
            "call group.wait_ready() before the next call",
            **facts,
        )
        restart_error.__cause__ = cause
        return restart_error

    def _record_deaths(self, errors: Iterable[BaseException]) -> str:
        """Record the nodes whose workers died; return a note about these nodes for the error text."""
        nodes = dict.fromkeys(error.node for error in errors if isinstance(error, WorkerDied))
        return "; ".join(filter(None, (self._group.home.record_death(node) for node in nodes if node is not None)))

    def start_rebuild(self, cause: ColocateError) -> None:
        """Start a thread that rebuilds the group."""
        name = f"colocate-restart-{self._group.name}"
        thread = Thread(target=self._run, args=(cause,), name=name)
        try:
            thread.start()
        except RuntimeError as error:  # No thread is available for the restart.
            self._group.fail_for_good(cause, error)
        else:
            self._thread = thread

    def stop_waiting(self) -> None:
        """Prevent further restart attempts, because the group is closing."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the restart's thread has ended; the caller must have ended the workers before."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(RESTART_ENDS_WITHIN_S)

    # -- on the restart's thread

    def note_missing(self, missing: ColocateError, timeout: float) -> None:
        """Record why lost slots aren't replaced yet, and log the reason unless the last one was of the same kind."""
        before, self._missing = self._missing, missing
        if before is not None and isinstance(before, ClusterError) == isinstance(missing, ClusterError):
            return
        within = "" if timeout >= FOREVER_S else f" for {timeout:g} s at most (regrow_timeout)"
        self._log(f"group {self._group.name!r} waits for slots in place of lost ones{within}: {get_message(missing)}")

    def clear_missing(self) -> None:
        """Record that all lost slots have been replaced."""
        self._missing = None

    def wait_stopped(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the group closes; return whether the group is closing."""
        return self._stopping.wait(seconds)

    def _run(self, cause: ColocateError) -> None:
        group = self._group
        try:
            while True:
                fault = self._attempt()
                if fault is None or group.closed_by is not None:
                    return
                if self._used >= self.limit:
                    group.fail_for_good(cause, fault)
                    return
                self._log(f"group {group.name!r} could not be restarted, and is tried again: {get_message(fault)}")
        except BaseException as error:  # A bug here fails the group, because nothing else would rebuild the group.
            report_exception()
            group.fail_for_good(cause, error)

    def _attempt(self) -> BaseException | None:
        group = self._group
        if not group.workforce.wait_exited():
            self._used = self.limit
            return ColocateError(f"workers of group {group.name!r} did not go when killed")
        self._used += 1
        if not group.mark_restarting():
            return None
        if self._stopping.wait(min(BACKOFF_S * (2 ** (self._used - 1) - 1), LONGEST_BACKOFF_S)):
            return None
        found_source = group.roles_source()
        try:
            group.rebuild()
        except ClosedError as error:  # Another thread has closed the group, and may be ending the workers, too.
            group.workforce.kill_workers()
            return error
        except BaseException as error:  # Pickling roles runs user code, which may even raise SystemExit.
            group.workforce.kill_workers()
            if isinstance(error, RoleStartError) and (words := self._record_deaths(error.errors.values())):
                error.add_note(words)
            return error
        source = "anew" if found_source is None else f"from {found_source}"
        whole = len(group.all_indices)
        fewer = f", with {group.size} of {whole} slots" if group.size != whole else ""
        self._log(f"group {group.name!r} was restarted {source}{fewer} (generation {group.generation})")
        return None

    def _log(self, text: str) -> None:
        self._group.services.printer.call_soon(lambda: _log.warning(text))


class WorkerGroup(Owned):
    """The driver's record of a group: the workers, the order of calls, the residents, and the start and end.

    Attributes:
        services: The settings and threads of the runtime.
        size: The number of slots.
        base: The largest number that earlier drivers have used for calls, holds and residents.
        grace: Seconds that ranks have to stop after a failed call.
        generation: How often the group has been restarted.
    """

    grace = 10.0

    def __init__(
        self,
        services: Services,
        home: Slots,
        base: int,
        indices: Sequence[int],
        places: Sequence[Place],
        declared: Declared,
        name: str,
        restarts: int = 0,
        generation: int = 0,
    ) -> None:
        super().__init__("group", name, home, State.STARTING)
        self.services = services
        self.size = len(places)
        self.base = base
        self.generation = generation
        self.home = home
        self.all_indices = indices  # The group was created with these slots of the pool.
        self.indices = indices  # The group has these slots now, which may be fewer after a restart.
        self.declared = declared
        self.roles: Mapping[str, RoleInfo] = declared.infos
        self.seed = services.seed  # The roles' random generators are derived from this seed.
        self.start_timeout: float | None = None  # A start may take this many seconds.
        self.number = services.new_key()  # The number is unique even among groups of the same name.
        self._origins: dict[str, Origin] = {}  # Caches the common origin of each method's residents.
        self.order = CallOrder(self)
        self.background = declared.background  # These roles have a lane of their own.
        self.published = DefinitionPublisher(self)
        self.restarts = Restarts(self, restarts)
        self._parts: dict[str, GroupFeature] = {}  # Holds the features in use, by name.
        self.drafting: list[GroupFeature] = []  # Lists the features that insert calls before other calls.
        self.frees_first = False  # True if memory must be freed in workers before a call that may need memory.
        for options in (services, home, declared, *declared.specs.values()):
            for feature in features.option_features(options):
                self.get_part(feature)
        self._create_workforce(places)
        self.residents = Residents(self, self.order)
        self.unasked = UnaskedLog(self)
        self._notify_state(State.STARTING)  # Reported before `join_owner`, so that no other event comes first.
        self.join_owner()

    def _create_workforce(self, places: Sequence[Place]) -> None:
        self.questions = Questions(self)
        self.workforce = Workforce(self, places)

    # -- for calls and parts

    def check_usable(self, notes_restarts: bool = True) -> None:
        """Raise if the group is closed or has failed, or if a restart hasn't been acknowledged."""
        if self.life.is_usable and not self.is_forked:
            return
        if self.life.failure is not None and self.alive and (failure := self.life.take_failure()) is not None:
            raise copy.copy(failure)
        super().check_usable()
        if notes_restarts:
            self.restarts.check_noted()

    @property
    def failure(self) -> ColocateError | None:
        """The error of a failed group, which is the reason why the group can't be called."""
        return self.life.failure

    def check_open(self) -> None:
        """Raise if the group is closed; accept any other state."""
        super().check_usable()

    def is_paused(self, role: str) -> bool:
        return any(part.is_paused(role) for part in self.parts.values())

    def paused_seconds(self, since: float) -> float:
        """Return how many of the seconds after `since` don't count for deadlines, summed over all features."""
        return sum(part.paused_seconds(since) for part in self.parts.values())

    def stopped_slots(self) -> Mapping[int, str]:
        """Return, by slot, the reason why a feature has stopped a rank for an unlimited time."""
        return {slot: why for part in self.parts.values() for slot, why in part.stopped_slots().items()}

    def make_source(self, call: PendingCall, role: RoleInfo, spec: MethodSpec) -> Source:
        """Return the address of a call's kept result for workers. Takes no lock, because the main thread calls this.

        All residents of a method share one origin, which is packed once; calls with `ranks` have origins of their
        own.
        """
        assert call.keep is not None
        if call.targets is not role.slots:
            ranks = Ranks(role.ranks.world_size, role.ranks.meshes, targets=call.ranks)
            origin = Origin(self.name, role.slots, ranks, spec.collect, call.label, self.generation, self.number)
            return Source(call.keep, origin)
        cached_origin = self._origins.get(call.label)
        if cached_origin is None or cached_origin.generation != self.generation:
            cached_origin = Origin(
                self.name, role.slots, role.ranks, spec.collect, call.label, self.generation, self.number
            )
            self._origins[call.label] = cached_origin
        return Source(call.keep, cached_origin, call.partition)

    def send(self, slots: Sequence[int], message: Message, body: Any = None) -> None:
        executor = self.services.executor
        if body is not None:
            self.published.send_definitions(slots, (body,))
        frame = executor.frame(message.head(), body)
        for slot in slots:
            self.workforce.workers[slot].host.send(frame)
        executor.discard(frame)

    def get_part(self, name: str) -> GroupFeature:
        """Return a feature's driver-side object for this group, created at the first request.

        Raises:
            CapabilityError: The feature isn't installed.
        """
        half = self._parts.get(name)
        if half is None:
            new_half = features.group_class(name)(self)
            # If two threads create an object at the same time, both use only one of the objects.
            half = self._parts.setdefault(name, new_half)
            if half is new_half and type(new_half).prepend_calls is not GroupFeature.prepend_calls:
                self.drafting.append(new_half)
        return half

    @property
    def parts(self) -> Mapping[str, GroupFeature]:
        """The driver-side objects of the features in use, by feature name."""
        return self._parts.copy()

    def on_rank_halted(self, hold: Any, slot: int, told: Mapping[str, Any], is_back: bool) -> None:
        """Notify all features that a rank has stopped in a hold, the barrier after a failed call."""
        for name in told:
            self.get_part(name)
        for name, part in self.parts.items():
            part.on_rank_halted(hold, slot, told.get(name), is_back)

    def report_unfinished(self, back: Mapping[int, from_worker.HoldReached]) -> None:
        """Warn of an earlier driver's calls that only some ranks have finished; `back` has the reports by slot."""
        calls = {(number, label) for held in back.values() for number, label in held.unfinished}
        for number, label in sorted(calls):
            role = self.roles.get(label.partition(".")[0])
            slots = [slot for slot in back if role is None or slot in role.slots]
            lacking = [
                slot for slot in slots if any(number == other_number for other_number, _ in back[slot].unfinished)
            ]
            # Such a rank has finished the call, or never received it and has begun a later call.
            if any(back[slot].begun >= number for slot in slots if slot not in lacking):
                ranks = ", ".join(str(slot if role is None else role.slots.index(slot)) for slot in lacking)
                text = (
                    f"group {self.name!r} was left by its driver before all ranks had finished {label}: rank {ranks} "
                    "had not, others may have. What they hold may differ: restore a checkpoint, or spawn the group anew"
                )
                self.services.printer.call_soon(partial(_log.warning, text))

    def on_call_report(self, call: PendingCall, slot: int, told: Mapping[str, Any]) -> None:
        for name, plain in told.items():
            self.get_part(name).on_call_report(call, slot, plain)

    def on_all_halted(self, hold: Any) -> bool:
        """Start the features' work once all ranks have stopped in a hold; return whether there is any work."""
        return any(part.on_all_halted(hold) for part in self.parts.values())

    def make_sender(self) -> Callable[[int, Message], None]:
        """Return a function that sends a message to one worker of this generation, unless the worker has exited."""
        workers = self.workforce.workers
        return lambda slot, message: workers[slot].send(message)

    def inspect_worker(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Inspect a rank's process from outside, and call `then` with a description."""
        self.workforce.workers[slot].host.inspect(then)

    def node(self, slot: int) -> str:
        return self.workforce.workers[slot].boot.node

    def live_slots(self) -> list[int]:
        """Return the slots with running workers."""
        return [worker.slot for worker in self.workforce.workers if worker.exit is None]

    def has_left(self, slot: int) -> bool:
        """Return whether a worker runs no more role code, because lane, connection or process has ended."""
        worker = self.workforce.workers[slot]
        connection = worker.host.lane
        return worker.lane_ended or worker.exit is not None or (connection is not None and connection.is_finished)

    def unpack(self, body: Any) -> Any:
        if body is None:
            return None
        value = self.services.executor.codec.unpack(body, None)
        if self.published.shipped_modules.news:  # Unpickling the body may have imported a module.
            self.published.shipped_modules.check_late_imports()
        return value

    def borrowers(self, closing: Owned) -> list[str]:
        """Return descriptions of unfinished uses of the group's residents by groups outside of `closing`."""
        return self.residents.borrowers(closing)

    # -- what its workers say

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's message that isn't about the worker itself."""
        slot, order = worker.slot, self.order
        match message:
            case from_worker.Failed():
                if message.seq == 0:
                    self.workforce.on_build_failed(slot, message.failure, body)
                order.on_call_failed(slot, message, body)
            case from_worker.Heartbeat():
                order.on_heartbeat(slot, message)
            case from_worker.HoldReached():
                order.on_hold_reached(slot, message)
            case from_worker.Stack():
                order.stacks.on_stack(slot, message)
            case from_worker.CancelVote():
                order.on_cancel_vote(slot, message)
            case from_worker.Fetched():
                self.residents.on_part(slot, message, body)
            case from_worker.Ask():
                self.questions.on_question(worker, message)
            case to_worker.Define():
                self.published.on_definitions(worker, message, body)
            case from_worker.BundleFailed():
                self.published.on_bundle_failed(worker, message)
            case _:
                feature = features.import_messages(type(message).__name__)
                if feature is None:
                    raise TypeError(f"worker {slot} of group {self.name!r} says what no driver hears: {message!r}")
                self.get_part(feature).on_message(worker, message, body)

    def greet(self, worker: Worker) -> None:
        """Send the features' first messages to a new worker."""
        for part in self.parts.values():
            part.on_worker_started(worker)

    def gone(self, worker: Worker) -> None:
        for part in self.parts.values():
            part.on_worker_ended(worker)

    # -- its state

    def _notify_state(self, state: State, cause: ColocateError | None = None) -> None:
        self.services.notify_observers("colocate_group_changed", self.name, state.value, cause)

    def on_workers_ready(self) -> None:
        """Mark the group as ready, unless closed."""
        with self.order.lock:
            if self.life.set_ready():
                self._notify_state(State.READY)
                # Request the addresses of the workers that will forward large arguments to other workers.
                for worker in plan_relays(self.workforce.workers, 0)[1]:
                    worker.locate(lambda *_: None)

    def fail_group(self, error: ColocateError) -> None:
        """Fail all pending calls with an error and kill all workers. A restart may follow."""
        with self.order.lock:
            if self.life.state is not State.READY:
                return
            user_error = self.restarts.prepare_restart(error)
            pending = list(self.order.pending.values())
            somebody = any(call.keep is None and call.handle is None for call in pending)
            self.life.set_failed(user_error, is_told=somebody, recovers=user_error is not error)
            self._notify_state(State.FAILED, error)
            self.order.fail_all(user_error)
        self.residents.fail_requests(user_error)
        for part in self.parts.values():
            part.on_failed(user_error)
        self.workforce.kill_workers()
        if user_error is not error:
            self.restarts.start_rebuild(error)

    def fail_for_good(self, error: ColocateError, why: BaseException) -> None:
        """Mark the group's failure as final after a failed restart."""
        error.add_note(f"and group {self.name!r} could not be restarted: {format_error(why)}")
        with self.order.lock:
            self.life.set_failed(error, is_told=False, recovers=False)
            self._notify_state(State.FAILED, error)

    @property
    def may_resize(self) -> bool:
        """Whether a restart may continue with another number of slots."""
        return self.home.least < self.home.request.slots

    # -- its start

    def start_workers(self, timeout: float | None) -> None:
        """Start the group's workers.

        Raises:
            RoleStartError: The start has failed; everything is ended.
        """
        self.start_timeout = timeout
        if not self.services.executor.in_process:
            warn_of_rebound(self.declared, self.name, self.line)
        self._start_generation()

    def _start_generation(self) -> None:
        self.workforce.launch_workers()
        self.workforce.mark_ready()
        self.home.on_groups_changed()

    def builds(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the features' settings for roles, by role and feature."""
        found: dict[str, dict[str, Any]] = {}
        for feature, part in self.parts.items():
            for role, plain in part.role_configs().items():
                found.setdefault(role, {})[feature] = plain
        return found

    def told(self, says: Callable[[GroupFeature], Any]) -> dict[str, Any]:
        """Return the results of `says` to be sent to the workers, by feature name; a feature may return None."""
        return {name: plain for name, part in self.parts.items() if (plain := says(part)) is not None}

    def mark_restarting(self) -> bool:
        """Set the group's state to restarting; return False if the group is closed."""
        with self.order.lock:
            if not self.life.set_restarting():
                return False
            self._notify_state(State.RESTARTING)
            return True

    def rebuild(self) -> None:
        """Start the next generation of workers, after all workers of the last generation have exited.

        Raises:
            ColocateError: The start has failed.
        """
        places = self.home.secure_places(self)
        with self.order.lock:
            self.check_open()
            self.generation += 1
            if len(places) != self.size:
                self.size = len(places)
                resize_roles(self.declared, self.size)
            self.order.start_generation()
            self.published.start_generation()
            self._create_workforce(places)
            for part in self.parts.values():
                part.on_restarted()
            if (failure := self.life.take_failure()) is not None:
                self.residents.start_generation(failure)
        self._start_generation()

    def roles_source(self) -> str | None:
        """Return a text for the source of the roles' state after a restart; None for newly constructed roles."""
        return next((source for part in self.parts.values() if (source := part.source()) is not None), None)

    def tag(self) -> str | int | float | None:
        """Return the tag of the checkpoint that the roles were restored from; None for newly constructed roles."""
        return next((tag for part in self.parts.values() if (tag := part.tag()) is not None), None)

    # -- its end

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """Stop the workers from starting calls, and cancel the running calls."""
        if self.life.state is State.READY:
            self.send(self.live_slots(), to_worker.Stop())
        self.workforce.wind_down(grace, deadline)

    def hurry(self) -> None:
        super().hurry()
        self.workforce.stages.wake_waiters()

    def close_for(self, by: str, grace: float, force: bool) -> None:
        if self.home.survives(self):
            self._detach_borrowed(by)
            return
        if not self.claim_closing(by, force):
            return
        try:
            # After this block, a concurrent restart either has created new workers or won't create any.
            with self.order.lock:
                self._notify_state(State.CLOSING)
            self.restarts.stop_waiting()
            self.residents.break_borrows()
            errors = [error for part in self.parts.values() for error in part.finish_background(grace)]
            errors += self.workforce.end_workers(grace)
            self.restarts.join()
        finally:
            failed = self.residents.unreported_failures()
            self._fail_leftovers()
            self.disown()
            self.home.release_slots(self)
            self._notify_state(State.CLOSED)
            self.life.set_closed()
        errors += failed
        self.services.notify_observers("colocate_group_closed", self.name)
        raise_together(f"group {self.name!r} was closed with errors", errors)

    def _detach_borrowed(self, by: str) -> None:
        """Close this driver's use of a group that continues to run in a borrowed pool."""
        if not self.claim_closing(by):
            return
        self.residents.break_borrows()
        failed = [error for part in self.parts.values() for error in part.finish_background(0.0)]
        failed += self.residents.unreported_failures()
        self.detach()
        raise_together(f"group {self.name!r} was closed with errors", failed)

    def detach(self) -> None:
        """Stop using a group that no longer belongs to this driver; the workers continue to run."""
        self._fail_leftovers()
        self.restarts.stop_waiting()
        self.home.connection.release_name(self)
        self.disown()
        self._notify_state(State.CLOSED)
        self.life.set_closed()

    def _fail_leftovers(self) -> None:
        error = ClosedError(f"group {self.name!r} was closed by {self.closed_by}", closed_by=self.closed_by)
        self.order.fail_all(error)
        self.unasked.log_all()
        self.residents.fail_requests(error)
        for part in self.parts.values():
            part.on_failed(error)
