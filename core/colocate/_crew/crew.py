"""`Crew`: the workers of a group, and all that the calls on them share."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate._calls.cancel import Cancellations
from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._calls.records import MoveRecord
from colocate._calls.services import Services
from colocate._crew.attachment import Attachment
from colocate._crew.ledgers import Ledgers
from colocate._crew.questions import Questions, Tell
from colocate._crew.restart import Restartable, Restarts
from colocate._crew.saved import Checkpoint
from colocate._crew.sleepers import Sleepers
from colocate._crew.spawn import Declared, warn_of_rebound
from colocate._crew.taught import Taught
from colocate._crew.worker import Worker
from colocate._crew.workforce import Workforce
from colocate._kept import Residents
from colocate._owned.owned import Owned, State, raise_together
from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.message import Message
from colocate._protocol.uses import Origin, Source
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._system.deadline import Deadline
from colocate._system.jobs import error_text
from colocate._values.mesh import Ranks
from colocate.errors import ClosedError, ColocateError
from colocate.executor import Place, Request


class Home(Owned, abc.ABC):
    """What a crew needs of the pool whose slots it has."""

    request: Request
    attachment: Attachment | None

    @abc.abstractmethod
    def others(self) -> Mapping[str, Crew]:
        """The crews of its runtime, by name."""

    @abc.abstractmethod
    def places_for(self, crew: Crew) -> Sequence[Place]:
        """Where its slots lie; reserved anew if the engine has lost some."""

    @abc.abstractmethod
    def changed(self) -> None:
        """What drivers after this one are to know of its groups has changed."""

    @abc.abstractmethod
    def goes_on(self, crew: Crew) -> bool:
        """Whether it lives on when this driver lets go of it."""

    @abc.abstractmethod
    def forget(self, crew: Crew) -> None:
        """Its name is free."""

    @abc.abstractmethod
    def vacate(self, crew: Crew) -> None:
        """It has gone: its slots are free."""


class Crew(Restartable):
    """The workers of a group, with the order of their calls, what they keep, and how they start and end.

    Attributes:
        indices: The slots of the pool that it has.
        declared: Its roles as they were declared.
        roles: Its roles by name.
        seed: What the generators of its roles are derived from.
        sleepers: Which roles may have memory that sleeps.
    """

    def __init__(
        self,
        services: Services,
        home: Home,
        base: int,
        indices: Sequence[int],
        places: Sequence[Place],
        declared: Declared,
        name: str,
        restarts: int = 0,
        generation: int = 0,
    ) -> None:
        super().__init__(name, home, services, len(places), base, generation)
        self.home = home
        self.indices = indices
        self.declared = declared
        self.roles: Mapping[str, RoleInfo] = declared.infos
        self.seed = services.seed
        self._start_timeout: float | None = None
        self._origins: dict[str, Origin] = {}  # by method
        self.order = CallOrder(self)
        self.life.on_change = self._look_at_life
        self._look_at_life()
        self.cancellations = Cancellations(self.order)
        self.taught = Taught(self, self.order.lock, lambda: self.workforce.workers)
        self.restarts = Restarts(self, restarts)
        self.sleepers = Sleepers(self.roles if home.attachment is not None else ())
        self._begin(places)
        self.residents = Residents(self, self.order)
        self._tell_state(State.STARTING)  # before `join`: from there on something else may be told
        self.join()

    def _begin(self, places: Sequence[Place]) -> None:
        """A generation of workers."""
        self.questions = Questions(self.order, self.taught, self._locate)
        self.workforce = Workforce(self, self.order, self.home.request, places, self)
        self.ledgers = Ledgers(self)

    # -- what its calls and parts need

    def check(self) -> None:
        """Raise unless it can be called: it is closed, or has failed, or nobody has noted that it was restarted."""
        if self.life.failure is not None and self.alive and (failure := self.life.told()) is not None:
            raise copy.copy(failure)
        super().check()
        self.restarts.check()

    def cancel(self, call: PendingCall) -> bool:
        """Withdraw a call from all ranks, if none has begun it."""
        return self.cancellations.cancel(call)

    def source(self, call: PendingCall, role: RoleInfo, spec: MethodSpec) -> Source:
        """A kept call's resident, as workers know it."""
        assert call.keep is not None
        return Source(call.keep, self._origin(call, role, spec))

    def _origin(self, call: PendingCall, role: RoleInfo, spec: MethodSpec) -> Origin:
        """One for all residents of a method, so that it is packed once; those of calls that name ranks have their own.

        This takes no lock, as the main thread calls it.
        """
        ranks = role.ranks
        if call.targets is not role.slots:
            ranks = Ranks(ranks.world_size, ranks.meshes, targets=call.ranks)
            return Origin(self.name, role.slots, ranks, spec.collect, call.label, self.generation)
        origin = self._origins.get(call.label)
        if origin is None or origin.generation != self.generation:
            origin = Origin(self.name, role.slots, ranks, spec.collect, call.label, self.generation)
            self._origins[call.label] = origin
        return origin

    def send(self, slots: Sequence[int], message: Message, body: Any = None) -> None:
        """Send one message to some workers."""
        executor = self.services.executor
        if body is not None:
            self.taught.before(slots, (body,))
        frame = executor.frame(message.head(), body)
        for slot in slots:
            self.workforce.workers[slot].host.send(frame)
        executor.discard(frame)

    def teller(self) -> Callable[[int, Message], None]:
        """What sends a message to one worker of this generation, if it runs."""
        return self.workforce.tell

    def look(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Have said what a rank does, as it is seen from outside."""
        self.workforce.workers[slot].host.look(then)

    def node(self, slot: int) -> str:
        """The node of a slot."""
        return self.workforce.workers[slot].boot.node

    def live(self) -> list[int]:
        """The slots whose workers run."""
        return [worker.slot for worker in self.workforce.workers if worker.exit is None]

    def has_left(self, slot: int) -> bool:
        """Whether a slot's worker runs no role code any more: its lane has ended, or all of it."""
        worker = self.workforce.workers[slot]
        return worker.lane_ended or worker.exit is not None

    def unpack(self, body: Any) -> Any:
        """The value of a body."""
        if body is None:
            return None
        value = self.services.executor.codec.unpack(body, None)
        self.taught.given.refuse_late()  # that has perhaps imported something
        return value

    def borrowers(self, closing: Owned) -> list[str]:
        """Unfinished uses of its residents by groups that don't lie in what is closing."""
        return self.residents.borrowers(closing)

    # -- what its workers say

    def said_hello(self, worker: Worker) -> None:
        """A worker runs."""
        self.workforce.said_hello(worker)

    def done(self, slot: int, done: from_worker.Done, body: Any) -> None:
        """A rank has finished a call."""
        if done.seq == 0:
            self.workforce.built(slot, None)
            return
        self.order.done(slot, done, body)

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """A worker has said something that isn't about itself."""
        _HEARD[type(message)](self, worker, message, body)

    def broken(self, worker: Worker, reason: str) -> None:
        """A worker is of no use any more."""
        self.workforce.broken(worker, reason)

    def lane_ended(self, worker: Worker) -> None:
        """A worker runs role code no longer, and is about to leave."""
        self.workforce.lane_ended(worker)

    def exited(self, worker: Worker) -> None:
        """A worker is gone."""
        self.cancellations.gone(worker.slot)
        self.workforce.exited(worker)

    def _failed(self, worker: Worker, failed: from_worker.Failed, body: Any) -> None:
        if failed.seq == 0:
            self.workforce.build_failed(worker.slot, failed.failure, body)
        self.order.failed(worker.slot, failed, body)

    def _alive(self, worker: Worker, alive: from_worker.Alive, body: None) -> None:
        self.order.alive(worker.slot, alive.number)

    def _held(self, worker: Worker, held: from_worker.Held, body: None) -> None:
        self.order.held(worker.slot, held)

    def _renewed(self, worker: Worker, renewed: from_worker.GroupsDropped, body: Any) -> None:
        self.order.renewed(worker.slot, renewed, body)

    def _stack(self, worker: Worker, stack: from_worker.Stack, body: None) -> None:
        self.order.stacks.answered(worker.slot, stack)

    def _ledger_told(self, worker: Worker, told: from_worker.LedgerTold, body: None) -> None:
        self.ledgers.answered(worker, told)

    def _moved(self, worker: Worker, moved: from_worker.Moved, body: None) -> None:
        rank = self.roles[moved.role].slots.index(worker.slot)
        kind = "sleep" if moved.asleep else "wake"
        told = moved.nbytes, moved.start, moved.end, moved.whole, moved.why
        how = moved.ahead, moved.in_call, moved.kept_awake
        record = MoveRecord(self.name, moved.role, rank, kind, *told, *how)
        self.services.tell("colocate_memory_moved", record)

    def _can_withdraw(self, worker: Worker, answer: from_worker.CanWithdraw, body: None) -> None:
        self.cancellations.answered(worker.slot, answer)

    def _fetched(self, worker: Worker, fetched: from_worker.Fetched, body: Any) -> None:
        self.residents.answered(worker.slot, fetched, body)

    def _ask(self, worker: Worker, asked: from_worker.Ask, body: None) -> None:
        self.questions.asked(worker, asked)

    def _define(self, worker: Worker, definitions: to_worker.Define, body: Any) -> None:
        self.taught.told(worker, definitions, body)

    def _undefined(self, worker: Worker, lost: from_worker.Undefined, body: None) -> None:
        self.taught.lost(worker, lost)

    def _locate(self, asked: questions.WhereIs, tell: Tell) -> None:
        """Tell where a worker of some group is reached."""
        group = asked.group
        found = self.home.others().get(group)
        if found is None or not found.alive:
            tell(None, f"group {group!r} is closed")
            return
        if found.generation != asked.generation:
            tell(None, f"group {group!r} has been restarted")
            return

        def located(address: str | None, why: str) -> None:
            words = f"worker {asked.slot} of group {group!r} can't be reached by others: {why}"
            tell(address, None if address is not None else words)

        found.workforce.workers[asked.slot].locate(located)

    # -- its state

    def _tell_state(self, state: State, cause: ColocateError | None = None) -> None:
        """Tell observers."""
        self.services.tell("colocate_group_changed", self.name, state.value, cause)

    def _look_at_life(self) -> None:
        """Calls may be sent at once while `check` has nothing to say."""
        (self.order.gate.open if self.life.is_plain else self.order.gate.shut)("its life")

    def became_ready(self) -> None:
        """Its workers are: it can be called, unless it is closed."""
        with self.order.lock:
            if self.life.ready():
                self._tell_state(State.READY)

    def fail(self, error: ColocateError) -> None:
        """It can't go on: every pending call ends with this error, every worker is ended."""
        with self.order.lock:
            if self.life.state is not State.READY:
                return
            told = self.restarts.begin(error)
            somebody = any(call.keep is None for call in list(self.order.pending.values()))
            self.life.fail(told, is_told=somebody, recovers=told is not error)
            self._tell_state(State.FAILED, error)
            self.order.fail_all(told)
        self.residents.fail(told)
        self.ledgers.fail(told)
        self.workforce.kill()
        if told is not error:
            self.restarts.go(error)

    def fail_for_good(self, error: ColocateError, why: BaseException) -> None:
        """It could not be restarted."""
        error.add_note(f"and group {self.name!r} could not be restarted: {error_text(why)}")
        with self.order.lock:
            self.life.fail(error, is_told=False, recovers=False)
            self._tell_state(State.FAILED, error)

    # -- its start

    def start(self, timeout: float | None, restore: Path | None) -> None:
        """Start its workers, with roles as constructed or as a checkpoint has them.

        Raises:
            RoleStartError: They don't start; everything is ended.
        """
        self._start_timeout = timeout
        if not self.services.executor.in_process:
            warn_of_rebound(self.declared, self.name, self.line)
        if restore is None:
            self._start(lambda: None)
            return
        folder = restore.absolute()
        Checkpoint.read(folder, self.roles)  # what is wrong with it is told before anything is started

        def latest() -> Checkpoint:
            return Checkpoint.read(folder, self.roles)

        self._start(latest)

    def _start(self, checkpoint: Callable[[], Checkpoint | None]) -> None:
        def found() -> Checkpoint | None:
            self.restarts.began_from(checkpoint())
            return self.restarts.checkpoint

        self.workforce.start(self.declared, self.seed, self._start_timeout, found)
        self.workforce.ready()
        self.home.changed()

    def begin_again(self) -> bool:
        """It is being rebuilt from now on; False when it is closed."""
        with self.order.lock:
            if not self.life.restart():
                return False
            self._tell_state(State.RESTARTING)
            return True

    def rebuild(self) -> None:
        """Start its next generation; the last one's workers are gone.

        Raises:
            ColocateError: It doesn't start.
        """
        places = self.home.places_for(self)
        with self.order.lock:
            self.refuse_closed()
            self.generation += 1
            self.order.renew()
            self.taught.renew()
            self.sleepers.renew()
            self._begin(places)
            if (failure := self.life.told()) is not None:
                self.residents.renew(failure)
        self._start(lambda: self.restarts.checkpoint)

    # -- its end

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """Have its workers begin nothing any more, and tell the calls that run that nobody waits for them."""
        if self.life.state is State.READY:
            self.send(self.live(), to_worker.Stop())
        self.workforce.wind_down(grace, deadline)

    def hurry(self) -> None:
        """Nobody waits any more for what still runs in it: its grace period is over."""
        super().hurry()
        self.workforce.hurry()

    def close_for(self, by: str, grace: float, force: bool) -> None:
        """Close it on behalf of `by`."""
        if self.home.goes_on(self):
            self._let_go(by)
            return
        if not self.take_closing(by, force):
            return
        try:
            with self.order.lock:  # whoever rebuilds it has either made its new workers or will make none
                self._tell_state(State.CLOSING)
            self.restarts.stop()
            self.residents.break_borrows()
            errors = self.workforce.end(grace)
            self.restarts.join()
        finally:
            failed = self.residents.unseen()
            self._fail_what_is_left()
            self.disown()
            self.home.vacate(self)
            self._tell_state(State.CLOSED)
            self.life.end()
        errors += failed
        self.services.tell("colocate_group_closed", self.name)
        raise_together(self._words, errors)

    def _let_go(self, by: str) -> None:
        """Let go of it where it goes on in a borrowed pool: what this driver has in it ends."""
        if not self.take_closing(by):
            return
        self.residents.break_borrows()
        failed = self.residents.unseen()
        self.leave()
        raise_together(self._words, failed)

    def leave(self) -> None:
        """It isn't this driver's any more; nothing of it is ended."""
        self._fail_what_is_left()
        self.restarts.stop()
        self.home.forget(self)
        self.disown()
        self._tell_state(State.CLOSED)
        self.life.end()

    def _fail_what_is_left(self) -> None:
        error = ClosedError(f"group {self.name!r} was closed by {self.closed_by}", closed_by=self.closed_by)
        self.order.fail_all(error)
        self.residents.fail(error)
        self.ledgers.fail(error)

    @property
    def _words(self) -> str:
        return f"group {self.name!r} was closed, and this had gone wrong"


_HEARD: dict[type[Message], Callable[[Crew, Worker, Any, Any], None]] = {
    from_worker.Failed: Crew._failed,
    from_worker.Alive: Crew._alive,
    from_worker.Held: Crew._held,
    from_worker.GroupsDropped: Crew._renewed,
    from_worker.Stack: Crew._stack,
    from_worker.LedgerTold: Crew._ledger_told,
    from_worker.Moved: Crew._moved,
    from_worker.CanWithdraw: Crew._can_withdraw,
    from_worker.Fetched: Crew._fetched,
    from_worker.Ask: Crew._ask,
    to_worker.Define: Crew._define,
    from_worker.Undefined: Crew._undefined,
}
