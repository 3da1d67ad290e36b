"""The steps of a program: each step makes calls, and records their data for the model."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import attrs
from tests.chaos import rollouts
from tests.chaos.machine import Failing, mixed, put_in, row
from tests.chaos.model import as_written, seen_by, within
from tests.chaos.programs import BACKGROUND, FREED, TURNERS, Step
from tests.chaos.records import PlayedGroup, Sent

import colocate
from colocate._signals.deferred import run_deferred
from colocate.features.memory.calls import start_sleep, start_wake
from colocate.features.rows.row_stream import RowStream

LONG_S = float(os.environ.get("COLOCATE_CHAOS_LONG_S", "30"))
"""The timeout of calls that only the import of torch should delay, on a machine that is busy with faults."""
SHORT_S = 0.3
SPAWN_S = 60.0  # the imports of a training worker take seconds, and many on a busy machine
STACKS_S = 0.5  # the wait of a timed out call for the stacks of its late ranks
HANG_S = 5.0  # an operation that exceeds its bound by this much hangs

Say = Callable[[str, float], None]


@attrs.define(eq=False)
class _Kept:
    """Rows that are residents in workers."""

    owner: PlayedGroup
    sent: Sent
    resident: Any
    rows: list[bytes]


def moved(outcomes: Sequence[Any]) -> str | None:
    """Return a complaint if a worker has refused a sleep or wake."""
    refused = [each.refusal for each in outcomes if each.refusal is not None]
    return f"refused: {refused}" if refused else None


def _key(row: int) -> int:
    return rollouts.key_of(row)


class Steps:
    """Runs steps on the groups of one episode."""

    def __init__(self, played: Sequence[PlayedGroup], idents: Iterator[int], say: Say) -> None:
        self.folders: list[str] = []  # the folders of checkpoints
        self.hangs: list[str] = []  # complaints about operations that have outlived their bounds
        self._idents = idents
        self._say = say
        self._played = played
        self._kept: list[_Kept] = []

    @contextmanager
    def bound(self, what: str, seconds: float) -> Iterator[None]:
        """Run a block that must end within a time, and report the bound to the watcher."""
        self._say(what, seconds)
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self._say("", 0.0)
            if took > seconds + HANG_S:
                self.hangs.append(f"{what} took {took:.2f} s, and has a bound of {seconds:.2f} s")

    def settle(self, calls: Iterable[Sent]) -> None:
        for sent in calls:
            self.wait(sent)

    def wait(self, sent: Sent) -> None:
        if sent.settled is not None or sent.call is None:
            return
        at_most = (LONG_S if sent.timeout is None else sent.timeout) + STACKS_S
        self._say(str(sent), at_most)
        try:
            sent.value = sent.call.result(at_most + HANG_S)
        except TimeoutError as error:
            if not sent.call.done():
                self.hangs.append(f"{sent} is not done {HANG_S:g} s after its timeout of {sent.timeout} s")
                return
            sent.error = error
        except Exception as error:
            sent.error = error
        finally:
            self._say("", 0.0)
        sent.settled = time.monotonic()

    def submit(self, played: PlayedGroup, sent: Sent, call: Callable[[Any, int], Any], role: str = "a") -> Any:
        """Submit a call, and return the handle; None if the group refuses the call."""
        assert played.group is not None
        played.sent.append(sent)
        sent.generation, sent.role, sent.begin = played.generation, role, call
        sent.submitted = time.monotonic()
        try:
            made = call(played.group.role(role), sent.ident)
        except Exception as error:
            sent.error, sent.settled = error, time.monotonic()
            return None
        if isinstance(made, colocate.Call):
            sent.call = made
        else:
            sent.call = colocate.Call(getattr(made, "_call", None) or made._kept.call)
        return made

    def new(self, what: str, ranks: Sequence[int], timeout: float | None, **more: Any) -> Sent:
        return Sent(next(self._idents), what, tuple(ranks), timeout, lambda value: None, **more)

    def call(
        self,
        played: PlayedGroup,
        what: str,
        ranks: Sequence[int],
        timeout: float | None,
        *arguments: Any,
        role: str = "a",
        chosen: bool = False,
        **more: Any,
    ) -> Sent:
        """Submit a call of a role's method, on all of its ranks or on chosen ones."""
        sent = self.new(what, ranks, timeout, **more)
        options: dict[str, Any] = {"timeout": timeout, **({"ranks": list(ranks)} if chosen else {})}
        self.submit(
            played, sent, lambda view, ident: getattr(view, what).options(**options).submit(ident, *arguments), role
        )
        return sent

    def do(self, step: Step, timeout: float | None = LONG_S) -> Sent | None:
        played = self._played[step.group]
        if played.group is None:
            return None
        sent: Sent | None = getattr(self, f"_{step.what}")(step, played, timeout)
        return sent

    def _role(self, played: PlayedGroup, step: Step) -> tuple[str, tuple[int, ...]]:
        if step.role == "b" and played.second:
            return "b", played.second
        if step.role in TURNERS and played.budget:
            return step.role, tuple(range(played.slots))
        if step.role == BACKGROUND and played.background:
            return step.role, tuple(range(played.slots))
        return "a", tuple(range(played.slots))

    def _plain(self, step: Step, played: PlayedGroup, timeout: float | None, chosen: tuple[int, ...] = ()) -> Sent:
        role, slots = self._role(played, step)
        ranks = tuple(rank for rank in chosen if rank in slots) or slots
        payload = bytes(step.size)
        sent = self.call(played, "step", ranks, timeout, step.work_s, payload, role=role, chosen=ranks != slots)
        sent.expected = seen_by([(rank, mixed(sent.ident, rank, payload)) for rank in ranks])
        return sent

    # -- the steps

    def _step(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        sent = self._plain(step, played, timeout)
        self.wait(sent)
        return sent

    def _submit(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        return [self._plain(step, played, timeout) for _ in range(step.count)][-1]

    def _look(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        role, slots = self._role(played, step)
        sent = self.call(played, "look", slots, timeout, role=role)
        sent.expected = as_written(played, role, len(slots))
        return sent

    def _turns(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Call roles in the same order again and again; some calls write, and some don't."""
        for number in range(step.count):
            for place, role in enumerate(step.roles):
                one = self._look if (number + place) % 2 else self._plain
                sent = one(attrs.evolve(step, role=role), played, timeout)
        return sent

    def _memory(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        self.settle(played.sent)
        sent = self.now(played, "memory", LONG_S, lambda group: group.memory(LONG_S))
        sent.expected = within(played.budget)
        return sent

    def now(
        self,
        played: PlayedGroup,
        what: str,
        timeout: float,
        do: Callable[[colocate.ColocatedGroup], Any],
        role: str = "a",
    ) -> Sent:
        """Run an operation of the group that no rank notes, to its end."""
        sent = self.new(what, (), timeout)
        group = played.group
        assert group is not None
        played.sent.append(sent)
        sent.generation, sent.role, sent.submitted = played.generation, role, time.monotonic()
        with self.bound(f"{what}()", timeout):
            try:
                sent.value = do(group)
            except Exception as error:
                sent.error = error
        sent.settled = time.monotonic()
        return sent

    def _sync(self, step: Step, played: PlayedGroup, timeout: float | None) -> None:
        self.settle(played.sent)

    def _checkpoint(self, step: Step, played: PlayedGroup, timeout: float | None) -> None:
        assert played.group is not None
        self.settle(played.sent)
        tag = next(self._idents)
        self.folders.append(tempfile.mkdtemp())
        with self.bound("checkpoint", LONG_S):
            played.group.checkpoint(os.path.join(self.folders[-1], "saved"), tag)
        played.checkpoint, played.saved[tag] = tag, played.generation

    def _make(self, step: Step, played: PlayedGroup, timeout: float | None) -> _Kept | None:
        slots = range(played.slots)
        sent = self.new("make", slots, timeout)
        resident = self.submit(
            played,
            sent,
            lambda view, ident: view.make.options(timeout=timeout).keep(ident, step.work_s, 2, step.size),
        )
        rows = [row(sent.ident, rank, index, step.size) for rank in slots for index in range(2)]
        # The value stays in the workers, and is checked by a call that takes the value.
        if resident is None:
            return None
        sent.kept = _Kept(played, sent, resident, rows)
        self._kept.append(sent.kept)
        return self._kept[-1]

    def _use(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent | None:
        """Pass rows from all ranks to all ranks, from worker to worker except for a rank's own."""
        kept = self._make(step, played, timeout)
        if kept is None:
            return None
        role, slots = self._role(played, step)
        sent = self.new("take", slots, timeout)
        sums = [zlib.crc32(each) for each in kept.rows]
        sent.expected = seen_by([(rank, sums) for rank in slots])
        self.submit(
            played,
            sent,
            lambda view, ident: view.take.options(timeout=timeout).submit(ident, kept.resident.ref),
            role,
        )
        return sent

    def _pipeline(self, step: Step, played: PlayedGroup, timeout: float | None) -> None:
        """Send several calls in one message, the later ones with results of earlier ones."""
        assert played.group is not None
        begun = len(played.sent)
        try:
            with played.group.pipeline():
                for _ in range(step.count):
                    self._plain(step, played, timeout)
                self._use(step, played, timeout)
        except Exception as error:  # the group has failed meanwhile: no call was sent
            for sent in played.sent[begun:]:
                sent.error, sent.settled, sent.call = error, time.monotonic(), None

    def _sleep(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Put a role's memory to sleep; later calls wake it."""
        return self._moved(step, played, timeout, start_sleep)

    def _wake(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Wake a role that sleeps, first by a call, and then by `wake`."""
        self._moved(step, played, timeout, start_sleep)
        self._plain(step, played, timeout)
        self._moved(step, played, timeout, start_sleep)
        return self._moved(step, played, timeout, start_wake)

    def _moved(self, step: Step, played: PlayedGroup, timeout: float | None, move: Callable[..., Any]) -> Sent:
        group = played.group
        assert group is not None
        role, _ = self._role(played, step)
        sent = self.new(move.__name__.removeprefix("start_"), (), timeout)  # no rank notes this call
        sent.expected = moved

        def later(view: Any, ident: int) -> colocate.Call[Any]:
            return colocate.Call(run_deferred(lambda: move(group._node, role, None, timeout)))

        self.submit(played, sent, later)
        return sent

    def _fail(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        role, slots = self._role(played, step)
        ranks = tuple(rank for rank in step.ranks if rank in slots) or slots[:1]
        return self.call(played, "fail", slots, timeout, step.work_s, ranks, role=role, fails=ranks)

    def _add(self, step: Step, played: PlayedGroup, timeout: float | None, fails: tuple[int, ...] = ()) -> Sent:
        """Call a collective on all ranks."""
        slots = range(played.slots)
        sent = self.call(played, "add", slots, timeout, fails, fails=fails)
        total = sum(put_in(sent.ident, rank) for rank in slots)
        sent.expected = seen_by([(rank, total) for rank in slots])
        return sent

    def _add_failing(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Call a collective in which some ranks raise while the others wait."""
        return self._add(step, played, timeout, tuple(rank for rank in step.ranks if rank < played.slots) or (0,))

    def _train(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        return [self._one_train(played, timeout) for _ in range(step.count)][-1]

    def _train_failing(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Make training steps that raise on some ranks, each followed by a step that succeeds."""
        for number in range(step.count):
            where = FREED[(FREED.index(step.where) + number) % len(FREED)]
            self._one_train(played, timeout, where, step.ranks)
            last = self._one_train(played, timeout)
        return last

    def _tear(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Make a training step that raises on a rank while all others make their update, and two later calls."""
        self.settle(played.sent)
        sent = self._one_train(played, timeout, "after", step.ranks[:1])
        for then in (self._one_train(played, timeout), self._plain(step, played, timeout)):
            self.wait(then)
        self.wait(sent)
        return sent

    def _one_train(
        self, played: PlayedGroup, timeout: float | None, where: str = "", fails: Sequence[int] = ()
    ) -> Sent:
        slots = tuple(range(played.slots))
        fails = tuple(rank for rank in fails if rank in slots)
        # The model computes the value from all earlier steps.
        return self.call(played, "train", slots, timeout, fails, where, role="t", fails=fails, where=where)

    # -- what a rollout does

    def _weights(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Sync weights, with failures on a rank in some syncs; call the target after each sync."""
        giver = played if step.giver is None else self._played[step.giver]
        for number in range(step.count):
            if giver.group is not None:
                self._plain(attrs.evolve(step, role="b", size=0), giver, timeout)
                self._one_weights(step, played, giver, timeout, step.ranks if number % 2 == 0 else ())
            sent = self.call(played, "peek", range(played.slots), timeout, role="s")
        return sent

    def _one_weights(
        self,
        step: Step,
        played: PlayedGroup,
        giver: PlayedGroup,
        timeout: float | None,
        fails: tuple[int, ...],
        target: str = "s",
    ) -> Sent:
        source = "b" if giver.second else "a"
        fails = tuple(rank for rank in fails if rank < played.slots)
        sent = self.new("weights", (), timeout, giver=giver, given=source, fails=fails)
        sent.giving = giver.generation
        sent.expected = rollouts.synced(sent, played)

        def later(view: Any, ident: int) -> Any:
            assert giver.group is not None
            names = Failing(ident, fails).names() if fails else None
            return colocate.sync_weights.submit(
                giver.group.role(source), view, names=names, bucket=step.size, timeout=timeout
            )

        self.submit(played, sent, later, target)
        return sent

    def _rows(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Call a method whose rows end one by one, some with an error, and make further calls."""
        sent, stream = self._begin_rows(step, played, timeout)
        for _ in range(step.count):
            self._plain(step, played, timeout)
        if step.where == "all":
            self.wait(sent)
            sent.rows += enumerate(sent.value or ())
        elif stream is not None:
            self.read(stream, sent, played, 3 if step.where == "early" else None)
        rollouts.look_at_errors(sent)
        return sent

    def _begin_rows(self, step: Step, played: PlayedGroup, timeout: float | None) -> tuple[Sent, RowStream[Any] | None]:
        role, slots = self._role(played, step)
        count = 4 * len(slots) + 1
        fails = tuple(3 * rank for rank in step.ranks) if step.where in ("stream", "return") else ()
        returned = step.where == "return"
        sent = self.new("each" if step.where == "batch" else "play", (), timeout, count=count)
        sent.fails, sent.failing = ((), fails) if returned else (fails, ())
        options: dict[str, Any] = {"timeout": timeout}
        if returned:
            options["on_error"] = "return"
        if step.where != "batch":
            sent.sticky = step.sticky
            options |= {"sticky": _key if step.sticky else None, "retry": step.retry}
            if step.where == "all" and played.restarts:  # rows without a reader get no new workers
                options["retry"] = 0

        def begin(view: Any, ident: int) -> Any:
            call = getattr(view, sent.what).options(**options)
            more = () if step.where == "batch" else (fails,)
            return (call.submit if step.where == "all" else call.stream)([*range(count)], ident, step.work_s, *more)

        return sent, self.submit(played, sent, begin, role)

    def read(self, stream: RowStream[Any], sent: Sent, played: PlayedGroup, most: int | None = None) -> None:
        """Read a stream to its end, or until `most` rows have arrived, and close the stream."""
        patience = (LONG_S if sent.timeout is None else sent.timeout) + STACKS_S
        with self.bound(str(sent), patience + SPAWN_S if played.restarts else patience), stream:
            try:
                for found in stream:
                    sent.rows.append(found)
                    if len(sent.rows) == most:
                        sent.closed = True
                        break
            except Exception as error:
                sent.error = error
        sent.settled = time.monotonic()

    def _child(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Kill a role's child on some ranks: only this role's calls may fail, until another child runs."""
        slots, ranks = tuple(range(played.slots)), tuple(rank for rank in step.ranks if rank < played.slots) or (0,)
        self._plain(attrs.evolve(step, size=0), played, timeout)
        self.call(played, "orphan", slots, timeout, ranks, role="k", bereaved=ranks)
        self._plain(step, played, timeout)
        self._own(played, timeout)
        self.call(played, "revive", slots, timeout, role="k").expected = seen_by([(rank, True) for rank in slots])
        return self._own(played, timeout)

    def _pause(self, step: Step, played: PlayedGroup, timeout: float | None) -> Sent:
        """Pause the background role amid an activity, sync weights to the role, and resume the role."""
        slots = tuple(range(played.slots))
        step, beside = attrs.evolve(step, role=BACKGROUND, size=1 << 16), attrs.evolve(step, role="a", size=0)
        stream: RowStream[Any] | None = None
        if step.where in ("stream", "batch"):
            running, stream = self._begin_rows(attrs.evolve(step, ranks=()), played, timeout)
            if stream is not None and (first := self._first(stream, running)) is not None:
                running.rows.append(first)
        elif step.where == "submit":
            running = self._plain(attrs.evolve(step, size=0), played, timeout)
        else:
            running = self.call(played, step.where, slots, timeout, 5, step.work_s, role=BACKGROUND)
            running.expected = rollouts.versions_of(slots)
        for each in played.sent:
            if each.role == BACKGROUND and each.settled is None and not (each.call is not None and each.call.done()):
                each.aborted |= step.how == "abort"  # if the call runs
                each.beside = True  # if the call hasn't begun
        limit, how = LONG_S if timeout is None else timeout, cast("Literal['wait', 'keep', 'abort']", step.how)
        paused = self.now(
            played, "pause", limit, lambda group: group.pause(BACKGROUND, how=how, timeout=limit), BACKGROUND
        )
        if paused.fine:
            queued = self._plain(attrs.evolve(step, size=0), played, timeout)
            queued.beside = True
            for fails in {step.ranks, ()} if step.ranks else {()}:
                self.wait(self._one_weights(step, played, played, timeout, fails, BACKGROUND))
            self.wait(self._plain(beside, played, timeout))
            if queued.call is not None and queued.call.done() and queued.call.exception() is None:
                played.wrong.append(f"{queued} has run while its role was paused")
        self.now(played, "resume", LONG_S, lambda group: group.resume(BACKGROUND), BACKGROUND)
        if stream is not None and running.settled is None:
            self.read(stream, running, played)
        if stream is not None:
            rollouts.look_at_errors(running)
        return self.call(played, "peek", slots, timeout, role=BACKGROUND)

    def _first(self, stream: RowStream[Any], sent: Sent) -> tuple[int, Any] | None:
        """Return the first row of a stream; None after an error."""
        with self.bound(f"the first row of {sent}", (LONG_S if sent.timeout is None else sent.timeout) + STACKS_S):
            try:
                return next(stream)
            except Exception as error:
                sent.error, sent.settled = error, time.monotonic()
                return None

    def _own(self, played: PlayedGroup, timeout: float | None) -> Sent:
        """Call the role with children."""
        sent = self.call(played, "step", range(played.slots), timeout, 0.0, b"", role="k")
        sent.expected = seen_by([(rank, mixed(sent.ident, rank, b"")) for rank in range(played.slots)])
        return sent
