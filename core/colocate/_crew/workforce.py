"""The workers of one group: started together, and ended in a bounded time whatever they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from colocate._calls.failures import broken_error, death_error, failure_error, worker_error
from colocate._calls.link import Link
from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._calls.stacks import Stacks
from colocate._crew.saved import Checkpoint
from colocate._crew.spawn import BuildErrors, Declared, builds
from colocate._crew.stages import Stage, Stages
from colocate._crew.worker import NOT_LAUNCHED, Worker, WorkerEvents
from colocate._owned.owned import State
from colocate._plugins.needs import imports_of
from colocate._protocol import from_worker, to_worker, versions
from colocate._protocol.message import Message
from colocate._system.deadline import NEVER, Deadline
from colocate._system.jobs import Timer
from colocate._system.limits import AFTER_END_S, AFTER_FORCE_S, AFTER_KILL_S, IDLE_S, LOOKS_FOR_S, STACKS_WITHIN_S
from colocate.errors import ColocateError, WorkerDied
from colocate.executor import Boot, Detachable, Host, Place, Request
from colocate.worker.serving.output import log_levels


class Workforce:
    """Starts, watches and ends the workers of a group."""

    def __init__(
        self, link: Link, order: CallOrder, request: Request, places: Sequence[Place], events: WorkerEvents
    ) -> None:
        self._link = link
        self._order = order
        self._stages = Stages(len(places))
        self._lock = threading.Lock()  # the innermost one
        self._built: dict[int, ColocateError | None] = {}
        self._build_failed = False
        self._granted, self._overdue = 0.0, NEVER
        self._asked = False  # what the ranks are doing, and their answer
        self._stacks: Stacks | None = None
        self._timers: list[Timer] = []
        self._building_since: float | None = None
        self.began = time.time()
        services = link.services
        generation = f"@{link.generation}" if link.generation else ""
        levels = log_levels()
        self.workers = [
            Worker(
                events,
                services,
                order.lock,
                slot,
                Boot(
                    worker=f"{services.id}/{link.name}{generation}/{slot}",
                    group=link.name,
                    slot=slot,
                    node=place.node,
                    device=place.device,
                    cpus=request.cpus,
                    env=request.env,
                    secret=services.secret,
                    path=services.path,
                    host=place.host,
                    strict=services.strict,
                    generation=link.generation,
                    log_levels=levels,
                    ports=request.ports,
                ),
            )
            for slot, place in enumerate(places)
        ]
        self._places = places

    # -- start

    def start(
        self, declared: Declared, seed: int, timeout: float | None, checkpoint: Callable[[], Checkpoint | None]
    ) -> None:
        """Start the workers and construct the roles.

        Args:
            declared: The roles.
            seed: What their generators are derived from.
            timeout: Seconds that it may take; None for no limit.
            checkpoint: What the roles are restored from, found when the workers are about to; None leaves them as
                constructed.

        Raises:
            RoleStartError: A worker didn't start, or a role wasn't constructed; everything is ended.
        """
        link = self._link
        deadline = Deadline(timeout)
        executor = link.services.executor
        body = builds(declared, executor.codec, link.name, seed, link.generation, executor.in_process)
        imports = () if executor.in_process else imports_of(info.cls for info in declared.infos.values())
        for worker, place in zip(self.workers, self._places, strict=True):
            worker.boot = attrs.evolve(worker.boot, imports=imports)
            worker.host = self._launched(worker, place)
            if link.closed_by is not None:  # by another thread, which has no longer waited for this one
                worker.host.kill()
                link.check()
        if self._reached(Stage.RUNNING, deadline):
            self._check_versions()
        if not self._built:
            live = link.live()
            found = checkpoint()
            restored = None if found is None else (str(found.folder), found.identity)
            build = to_worker.Build(
                link.generation,
                len(self.workers),
                declared.default_group,
                self._nodes() if declared.torchrun else None,
                link.services.collective_timeout,
                link.services.spill_dir,
                declared.budgets,
                restored,
            )
            link.send(live, build, body)
            self._building_since = time.time()
            self._stages.wait(lambda: self._stages.all_reached(Stage.BUILT) or self._build_failed, deadline)
            if self._build_failed:
                # The others are told by a hold, and have as long as after any failed call.
                if link.closed_by is None:
                    self._granted = link.grace
                self._reached(Stage.BUILT, Deadline(link.grace))
        if link.closed_by is not None:
            link.check()
        errors = BuildErrors(link.name)
        for worker in self.workers:
            error = self._built.get(worker.slot)
            late = worker.slot not in self._built
            if late and not (self._build_failed and worker.hello is not None):
                error = self._late(worker)
                self._granted = timeout or 0.0
            if error is not None:
                errors.add(worker.slot, error)
        if errors.errors:
            raise errors.error()

    def _nodes(self) -> list[int]:
        """Which slots lie on one node, as a number for each slot."""
        names = [worker.boot.node for worker in self.workers]
        return [names.index(name) for name in names]

    def starting(self, longer_than: float) -> list[int]:
        """The slots whose workers have been starting for so many seconds."""
        return sorted(self._stages.short_of(Stage.BUILT)) if time.time() - self.began > longer_than else []

    def constructing(self, longer_than: float) -> list[int]:
        """The slots whose roles have been under construction for so many seconds."""
        since = self._building_since
        if since is None or time.time() - since <= longer_than:
            return []
        return sorted(self._stages.short_of(Stage.BUILT))

    def take(self, executor: Detachable, tokens: Sequence[bytes]) -> None:
        """Take up workers that an earlier driver has started, with all their roles constructed."""
        for worker, place, token in zip(self.workers, self._places, tokens, strict=True):
            self._built[worker.slot] = None
            worker.host = executor.take(place, worker.boot, worker, token)

    def wait_hello(self, grace: float) -> list[int]:
        """Wait until all workers have said hello, or have ended; the slots of those that haven't in time."""
        if not self._reached(Stage.RUNNING, Deadline(grace)):
            # This process may have been stopped: what has come meanwhile is taken first.
            self._reached(Stage.RUNNING, Deadline(LOOKS_FOR_S))
        return sorted(self._stages.short_of(Stage.RUNNING))

    def _launched(self, worker: Worker, place: Place) -> Host:
        link = self._link
        try:
            return link.services.executor.launch(place, worker.boot, worker)
        except ColocateError:
            raise
        except Exception as error:
            words = f"could not be started: {type(error).__name__}: {error}"
            failed = worker_error(link, worker.slot, None, words)
            failed.__cause__ = error
            errors = BuildErrors(link.name)
            errors.add(worker.slot, failed)
            raise errors.error() from error

    def built(self, slot: int, error: ColocateError | None) -> None:
        """A worker has constructed its roles, or has failed to."""
        self._built.setdefault(slot, error)
        if error is not None and not self._build_failed:
            self._build_failed = True
            self._stages.wake()
        self._stages.reach(slot, Stage.BUILT)

    def build_failed(self, slot: int, failure: from_worker.Failure, body: Any) -> None:
        """A constructor has raised."""
        role = failure.role
        call = PendingCall(
            f"the constructor of {role}", role or "", "__init__", [worker.slot for worker in self.workers]
        )
        self.built(slot, failure_error(self._link, call, slot, failure, body))

    def said_hello(self, worker: Worker) -> None:
        """A worker runs."""
        self._stages.reach(worker.slot, Stage.BUILT if worker.slot in self._built else Stage.RUNNING)

    def lane_ended(self, worker: Worker) -> None:
        """A worker runs role code no longer, and is about to leave."""
        self._stages.reach(worker.slot, Stage.LEAVING)

    def _late(self, worker: Worker) -> ColocateError:
        what = "did not start" if worker.hello is None else "did not construct its roles"
        return worker_error(self._link, worker.slot, worker.pid, f"{what} in time")

    def _check_versions(self) -> None:
        here = versions.facts()
        for worker in self.workers:
            if (words := versions.difference(here, worker.hello or here)) is not None:
                self.built(worker.slot, worker_error(self._link, worker.slot, worker.pid, words))

    def _reached(self, stage: Stage, deadline: Deadline) -> bool:
        """Wait until all workers have come so far; whether they have."""
        return self._stages.wait(lambda: self._stages.all_reached(stage), deadline)

    def _wait_or_hurry(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait as long as somebody waits for the group's end; whether it is so."""
        self._stages.wait(lambda: self._link.hurried or ready(), deadline)
        return ready()

    def hurry(self) -> None:
        """Nobody waits any more for what still runs."""
        self._stages.wake()

    def ready(self) -> None:
        """The group can be called. A worker that went after it had constructed its roles is found now."""
        self._link.became_ready()
        self.look()

    def look(self) -> None:
        """Note the workers that have gone while that didn't matter."""
        for worker in self.workers:
            if worker.exit is not None:
                self.exited(worker)

    # -- while it runs

    def tell(self, slot: int, message: Message) -> None:
        """Send a message to one worker."""
        self.workers[slot].send(message)

    def broken(self, worker: Worker, reason: str) -> None:
        """A worker is of no use any more, and leaves."""
        error = broken_error(self._link, worker.slot, worker.pid, reason)
        if self._link.life.is_starting:
            self.built(worker.slot, error)
        else:
            self._lost(error)

    def exited(self, worker: Worker) -> None:
        """A worker is gone."""
        assert worker.exit is not None
        link = self._link
        self._order.gone(worker.slot)
        if link.life.is_starting:
            running = "the constructors of its roles" if worker.hello is not None else None
            self.built(worker.slot, death_error(link, worker.slot, worker.pid, worker.exit, running))
        elif link.life.state is State.READY:
            with self._order.lock:
                running = next(
                    (call.label for call in list(self._order.pending.values()) if worker.slot in call.missing()), None
                )
            error = death_error(link, worker.slot, worker.pid, worker.exit, running)
            self._lost(error)
        self._stages.reach(worker.slot, Stage.GONE)

    def _lost(self, error: WorkerDied) -> None:
        """The group can't go on without a worker."""
        link = self._link
        if link.life.state is State.READY:
            link.fail(error)
            link.services.tell("colocate_worker_died", error)

    def kill(self) -> None:
        """End all of them now."""
        for worker in self.workers:
            if worker.exit is None:
                worker.host.kill()

    def wait_gone(self) -> bool:
        """Wait until all of them are gone, after `kill`; whether they are."""
        self._note_unlaunched()
        return self._reached(Stage.GONE, Deadline(AFTER_KILL_S))

    def _note_unlaunched(self) -> None:
        """The start of some was given up: nothing will come of them."""
        for worker in self.workers:
            if worker.host is NOT_LAUNCHED:
                self._stages.reach(worker.slot, Stage.GONE)

    # -- the end

    def end(self, grace: float) -> list[BaseException]:
        """End all of them: the lanes after what they run, at most `grace` seconds; then whatever is left.

        Returns:
            What went wrong.
        """
        link = self._link
        errors: list[BaseException] = []
        if (failure := link.life.untold()) is not None:
            errors.append(failure)
        self._note_unlaunched()
        try:
            link.send(link.live(), to_worker.Close(f"group {link.name!r} is closing"))
            errors += self._wait_for_lanes(grace)
            hung = self._stages.short_of(Stage.LEAVING)
            for slot in hung:  # first: others may wait for it, or for the processor that it keeps busy
                self.workers[slot].host.kill()
            within = AFTER_FORCE_S if hung else AFTER_END_S
            self._stages.wait(lambda: not self._stages.any_in(Stage.LEAVING), Deadline(within))
        finally:
            for timer in self._timers:
                timer.cancel()
            self.kill()
            self._reached(Stage.GONE, Deadline(AFTER_KILL_S))
        errors += [
            ColocateError(f"worker {slot} of group {link.name!r} (pid {self.workers[slot].pid}) did not go when killed")
            for slot in sorted(self._stages.short_of(Stage.GONE))
        ]
        return errors

    def _wait_for_lanes(self, grace: float) -> list[BaseException]:
        """Wait until all lanes have ended, at most `grace` seconds; what there is to say of those that haven't.

        The grace is for what they run: one that runs nothing has the moment that it takes to end in any case.
        """
        deadline, idle_until = Deadline(grace), Deadline(max(grace, IDLE_S))
        first = deadline.or_sooner(self._overdue)
        early = self._asked  # for its owner, before it was told to end
        if self._wait_or_hurry(self._idle, first.before(STACKS_WITHIN_S)):
            return []
        self._look()  # now: a rank that is stopped or holds the GIL never answers, and isn't waited for at the deadline
        if self._wait_or_hurry(self._idle, first):
            return []
        hung = self._hung(deadline)
        if early and self._stacks is not None:
            self._look_again(hung, deadline.before(STACKS_WITHIN_S / 2))
        if self._wait_or_hurry(lambda: self._busy() <= hung, idle_until) and self._idle():
            return []
        if self._link.failure is not None or self._link.hurried:  # what went wrong has been said, or nobody waits
            return []
        if not self._has_roles:  # nothing of the user's runs there
            return []
        self._stages.wait(lambda: self._stacks is not None, Deadline(2 * STACKS_WITHIN_S))
        stacks, allowed = self._stacks or Stacks(), self._granted or grace
        return [
            worker_error(
                self._link,
                w.slot,
                w.pid,
                f"did not end within {allowed:g} s and was ended; it was here:\n{stacks.of(w.slot)}",
            )
            for w in (self.workers[slot] for slot in sorted(self._busy()))
            if w.hello is not None  # one that hasn't even started was late, which its start has told
        ]

    @property
    def _has_roles(self) -> bool:
        """Whether roles were begun to be constructed, by this driver or an earlier one."""
        return self._building_since is not None or bool(self._built)

    def _busy(self) -> set[int]:
        """The slots whose lanes haven't ended."""
        return self._stages.short_of(Stage.LEAVING)

    def _idle(self) -> bool:
        return self._stages.all_reached(Stage.LEAVING)

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """The grace period of its owner is over at `deadline`, whenever this group's turn comes."""
        self._granted = max(self._granted, grace)
        self._overdue = self._overdue.or_sooner(deadline)
        wait_s = deadline.before(STACKS_WITHIN_S).left or 0.0
        self._timers.append(self._link.services.timers.after(wait_s, self._look))

    def _look_again(self, hung: set[int], at: Deadline) -> None:
        """Ask once more what the ranks are doing that were idle when they were asked, and haven't ended since."""
        if not self._wait_or_hurry(lambda: self._busy() <= hung, at):
            with self._lock:
                self._asked, self._stacks = False, None
            self._look()

    def _look(self) -> None:
        """Ask what the ranks are doing. Once."""
        with self._lock:
            asked, self._asked = self._asked, True
        if not asked:
            self._order.stacks.ask(sorted(self._busy()), self._looked)

    def _looked(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._stages.wake()

    def _hung(self, deadline: Deadline) -> set[int]:
        """The slots that still run what they ran, or don't answer, when the owner's grace was over: they have had it.

        Others, which are idle, have longer. Where nobody has had the time to say, those count that owe an answer.
        """
        self._wait_or_hurry(lambda: self._stacks is not None or self._idle(), deadline)
        stacks, busy = self._stacks, self._busy()
        silent = set() if stacks is None else busy - stacks.told.keys()
        running = self._order.owing() if stacks is None else self._order.still_running()
        constructing = self._stages.short_of(Stage.BUILT) if self._has_roles else set[int]()
        return busy & (silent | running | constructing)
