"""The workers of one group: started together, and ended in a bounded time whatever they do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colocate._failures import broken_error, death_error, failure_error, worker_error
from colocate._jobs import Timer
from colocate._link import Link
from colocate._order import CallOrder
from colocate._pending import PendingCall
from colocate._protocol import messages, versions
from colocate._protocol.message import Message
from colocate._spawn import BuildErrors, Declared, builds
from colocate._stacks import WITHIN_S, Stacks
from colocate._worker import NOT_LAUNCHED, Worker, WorkerEvents
from colocate.errors import ColocateError, WorkerDied
from colocate.executor import Boot, Detachable, Host, Place, Request

_LOOKS_FOR_S = 0.5
_AFTER_END_S = 5.0  # a worker whose lane has ended leaves by itself, unless a role's thread or exit handler keeps it
_AFTER_FORCE_S = 0.25  # the same where others had to be ended: by then the grace is over for all of them
_AFTER_KILL_S = 10.0
_IDLE_S = 0.5  # what a lane that runs nothing has to end, however short the grace: its message is on its way


class Workforce:
    """Starts, watches and ends the workers of a group."""

    def __init__(
        self, link: Link, order: CallOrder, request: Request, places: Sequence[Place], events: WorkerEvents
    ) -> None:
        self._link = link
        self._order = order
        self._news = threading.Condition()
        self._built: dict[int, ColocateError | None] = {}
        self._build_failed = False
        # The slots from which something is still to come: waiting takes no look at those from which it has.
        self._silent, self._unbuilt, self._busy, self._living = (set(range(len(places))) for _ in range(4))
        self._leaving: set[int] = set()
        self._granted, self._overdue_at = 0.0, math.inf
        self._asked = False  # what the ranks are doing, and their answer
        self._stacks: Stacks | None = None
        self._timers: list[Timer] = []
        self.started = False
        self.failure_seen = False
        self._building_since: float | None = None
        services = link.services
        generation = f"@{link.generation}" if link.generation else ""
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
                ),
            )
            for slot, place in enumerate(places)
        ]
        self._places = places

    # -- start

    def start(self, declared: Declared, seed: int, timeout: float | None, checkpoint: Path | None = None) -> None:
        """Start the workers and construct the roles.

        Args:
            declared: The roles.
            seed: What their generators are derived from.
            timeout: Seconds that it may take; None for no limit.
            checkpoint: Where the roles are restored from; None leaves them as constructed.

        Raises:
            RoleStartError: A worker didn't start, or a role wasn't constructed; everything is ended.
        """
        link = self._link
        deadline = None if timeout is None else time.monotonic() + timeout
        executor = link.services.executor
        body = builds(declared, executor.codec, link.name, seed, link.generation, executor.in_process)
        for worker, place in zip(self.workers, self._places, strict=True):
            worker.host = self._launched(worker, place)
            if link.closed_by is not None:  # by another thread, which has no longer waited for this one
                worker.host.kill()
                link.check()
        if self._wait(lambda: not self._silent, deadline):
            self._check_versions()
        if not self._built:
            live = link.live()
            restored = None if checkpoint is None else str(checkpoint)
            self._building_since = time.time()
            link.send(live, messages.Build(link.generation, declared.default_role, restored), body)
            self._wait(lambda: not self._unbuilt or self._build_failed, deadline)
            if self._build_failed:
                # The others are told by a hold, and have as long as after any failed call.
                if link.closed_by is None:
                    self._granted = link.grace
                self._wait(lambda: not self._unbuilt, time.monotonic() + link.grace)
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

    def constructing(self, longer_than: float) -> list[int]:
        """The slots whose roles have been under construction for so many seconds."""
        since = self._building_since
        if since is None or time.time() - since <= longer_than:
            return []
        return [worker.slot for worker in self._awaited(self._unbuilt)]

    def take(self, executor: Detachable, tokens: Sequence[bytes]) -> None:
        """Take up workers that an earlier driver has started, with all their roles constructed."""
        for worker, place, token in zip(self.workers, self._places, tokens, strict=True):
            self.built(worker.slot, None)
            worker.host = executor.take(place, worker.boot, worker, token)

    def wait_hello(self, grace: float) -> list[int]:
        """Wait until all workers have said hello, or have ended; the slots of those that haven't in time."""
        if not self._wait(lambda: not self._silent, time.monotonic() + grace):
            # This process may have been stopped: what has come meanwhile is taken first.
            self._wait(lambda: not self._silent, time.monotonic() + _LOOKS_FOR_S)
        return [worker.slot for worker in self._awaited(self._silent)]

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
        with self._news:
            self._built.setdefault(slot, error)
            if error is not None and not self._build_failed:
                self._build_failed = True
                self._news.notify_all()
            self._came(slot, self._unbuilt)

    def build_failed(self, slot: int, failure: messages.Failure, body: Any) -> None:
        """A constructor has raised."""
        role = failure.role
        call = PendingCall(
            f"the constructor of {role}", role or "", "__init__", [worker.slot for worker in self.workers]
        )
        self.built(slot, failure_error(self._link, call, slot, failure, body))

    def said_hello(self, worker: Worker) -> None:
        """A worker runs."""
        with self._news:
            self._came(worker.slot, self._silent)

    def lane_ended(self, worker: Worker) -> None:
        """A worker runs role code no longer, and is about to leave."""
        with self._news:
            if worker.exit is None:
                self._leaving.add(worker.slot)
            self._came(worker.slot, self._busy)

    def _came(self, slot: int, *awaited: set[int]) -> None:
        """What was awaited of a slot has come. Whoever waits is woken once, by the last one. With the lock held."""
        for slots in awaited:
            if slot in slots:
                slots.discard(slot)
                if not slots:
                    self._news.notify_all()

    def _awaited(self, slots: set[int]) -> list[Worker]:
        with self._news:
            return [self.workers[slot] for slot in sorted(slots)]

    def _late(self, worker: Worker) -> ColocateError:
        what = "did not start" if worker.hello is None else "did not construct its roles"
        return worker_error(self._link, worker.slot, worker.pid, f"{what} in time")

    def _check_versions(self) -> None:
        here = versions.facts()
        for worker in self.workers:
            if (words := versions.difference(here, worker.hello or here)) is not None:
                self.built(worker.slot, worker_error(self._link, worker.slot, worker.pid, words))

    def _wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        with self._news:
            return self._news.wait_for(ready, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _wait_or_hurry(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait as long as somebody waits for the group's end; whether it is so."""
        self._wait(lambda: self._link.hurried or ready(), deadline)
        return ready()

    def hurry(self) -> None:
        """Nobody waits any more for what still runs."""
        with self._news:
            self._news.notify_all()

    def ready(self) -> None:
        """The group can be called. A worker that went after it had constructed its roles is found now."""
        link = self._link
        with self._order.lock:
            if link.closed_by is None:
                self.started, self.failure_seen, link.failure = True, False, None
                link.enter("ready")
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
        """A thread that a worker needs has ended, and the worker with it."""
        error = broken_error(self._link, worker.slot, worker.pid, reason)
        if self.started:
            self._lost(error)
        else:
            self.built(worker.slot, error)

    def exited(self, worker: Worker) -> None:
        """A worker is gone."""
        assert worker.exit is not None
        link = self._link
        self._order.gone(worker.slot)
        if not self.started:
            running = "the constructors of its roles" if worker.hello is not None else None
            self.built(worker.slot, death_error(link, worker.slot, worker.pid, worker.exit, running))
        elif link.state in ("ready", "failed"):
            with self._order.lock:
                running = next(
                    (call.label for call in list(self._order.pending.values()) if worker.slot in call.missing()), None
                )
            error = death_error(link, worker.slot, worker.pid, worker.exit, running)
            self._lost(error)
        with self._news:
            self._came(worker.slot, self._silent, self._unbuilt, self._busy, self._leaving, self._living)

    def _lost(self, error: WorkerDied) -> None:
        """The group can't go on without a worker."""
        link = self._link
        if link.failure is None and link.closed_by is None:
            link.fail(error)
            link.services.tell("colocate_worker_died", error)

    def kill(self) -> None:
        """End all of them now."""
        for worker in self.workers:
            if worker.exit is None:
                worker.host.kill()

    def wait_gone(self) -> bool:
        """Wait until all of them are gone, after `kill`; whether they are."""
        with self._news:
            for worker in self.workers:
                if worker.host is NOT_LAUNCHED:
                    self._came(worker.slot, self._living)
        return self._wait(lambda: not self._living, time.monotonic() + _AFTER_KILL_S)

    # -- the end

    def end(self, grace: float) -> list[BaseException]:
        """End all of them: the lanes after what they run, at most `grace` seconds; then whatever is left.

        Returns:
            What went wrong.
        """
        link = self._link
        errors: list[BaseException] = []
        if link.failure is not None and not self.failure_seen:
            errors.append(link.failure)
        with self._news:
            for worker in self.workers:
                if worker.host is NOT_LAUNCHED:  # its start was given up: nothing will come of it
                    self._came(worker.slot, self._busy, self._living)
        try:
            link.send(link.live(), messages.Close(f"group {link.name!r} is closing"))
            errors += self._wait_for_lanes(grace)
            hung = self._awaited(self._busy)
            for worker in hung:  # first: others may wait for it, or for the processor that it keeps busy
                worker.host.kill()
            self._wait(lambda: not self._leaving, time.monotonic() + (_AFTER_FORCE_S if hung else _AFTER_END_S))
        finally:
            for timer in self._timers:
                timer.cancel()
            self.kill()
            gone = self._wait(lambda: not self._living, time.monotonic() + _AFTER_KILL_S)
        if not gone:
            errors += [
                ColocateError(f"worker {w.slot} of group {link.name!r} (pid {w.pid}) did not go when killed")
                for w in self._awaited(self._living)
            ]
        return errors

    def _wait_for_lanes(self, grace: float) -> list[BaseException]:
        """Wait until all lanes have ended, at most `grace` seconds; what there is to say of those that haven't.

        The grace is for what they run: one that runs nothing has the moment that it takes to end in any case.
        """
        deadline = time.monotonic() + grace
        idle_until = max(deadline, time.monotonic() + _IDLE_S)
        first = min(deadline, self._overdue_at)
        early = self._asked  # for its owner, before it was told to end
        if self._wait_or_hurry(lambda: not self._busy, first - WITHIN_S):
            return []
        self._look()  # now: a rank that is stopped or holds the GIL never answers, and isn't waited for at the deadline
        if self._wait_or_hurry(lambda: not self._busy, first):
            return []
        hung = self._hung(deadline)
        if early and self._stacks is not None:
            self._look_again(hung, deadline - WITHIN_S / 2)
        if self._wait_or_hurry(lambda: not self._busy - hung, idle_until) and not self._busy:
            return []
        if self._link.failure is not None or self._link.hurried:  # what went wrong has been said, or nobody waits
            return []
        self._wait(lambda: self._stacks is not None, time.monotonic() + 2 * WITHIN_S)
        stacks, allowed = self._stacks or Stacks(), self._granted or grace
        return [
            worker_error(
                self._link,
                w.slot,
                w.pid,
                f"did not end within {allowed:g} s and was ended; it was here:\n{stacks.of(w.slot)}",
            )
            for w in self._awaited(self._busy)
            if w.hello is not None  # one that hasn't even started was late, which its start has told
        ]

    def wind_down(self, grace: float, deadline: float) -> None:
        """The grace period of its owner is over at `deadline`, whenever this group's turn comes."""
        self._granted = max(self._granted, grace)
        self._overdue_at = min(self._overdue_at, deadline)
        wait_s = max(0.0, deadline - WITHIN_S - time.monotonic())
        self._timers.append(self._link.services.timers.after(wait_s, self._look))

    def _look_again(self, hung: set[int], at: float) -> None:
        """Ask once more what the ranks are doing that were idle when they were asked, and haven't ended since."""
        if not self._wait_or_hurry(lambda: not self._busy - hung, at):
            with self._news:
                self._asked, self._stacks = False, None
            self._look()

    def _look(self) -> None:
        """Ask what the ranks are doing. Once."""
        with self._news:
            asked, self._asked = self._asked, True
        if not asked:
            self._order.stacks.ask([worker.slot for worker in self._awaited(self._busy)], self._looked)

    def _looked(self, stacks: Stacks) -> None:
        with self._news:
            self._stacks = stacks
            self._news.notify_all()

    def _hung(self, deadline: float) -> set[int]:
        """The slots that still run what they ran, or don't answer, when the owner's grace was over: they have had it.

        Others, which are idle, have longer. Where nobody has had the time to say, those count that owe an answer.
        """
        self._wait_or_hurry(lambda: self._stacks is not None or not self._busy, deadline)
        with self._news:
            silent = set() if self._stacks is None else self._busy - self._stacks.told.keys()
            asked = self._stacks is not None
        running = self._order.still_running() if asked else self._order.owing()
        with self._news:
            return self._busy & (silent | running | self._unbuilt)
