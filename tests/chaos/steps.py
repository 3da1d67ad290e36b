"""The steps of a program: each makes calls, and notes what the model must know of them."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from tests.chaos.machine import mixed, put_in, row
from tests.chaos.model import as_written, each_row, seen_by, within
from tests.chaos.programs import FREED, TURNERS, Step
from tests.chaos.records import Played, Sent

import colocate
from colocate._signals.off_main import off_main
from colocate._views.sleeping import start_sleep, start_wake

LONG_S = float(os.environ.get("COLOCATE_CHAOS_LONG_S", "30"))
"""The timeout of calls that nothing should delay but the import of torch, on a machine that is busy with faults."""
SHORT_S = 0.3
STACKS_S = 0.5  # how long a timed out call asks its late ranks for their stacks
HANG_S = 5.0  # what outlives its bound by so much hangs

Say = Callable[[str, float], None]


@attrs.define(eq=False)
class _Kept:
    """Rows that lie in workers."""

    owner: Played
    sent: Sent
    resident: Any
    rows: list[bytes]


def moved(outcomes: Sequence[Any]) -> str | None:
    """Compares with memory that has gone, or come back, on all workers."""
    refused = [each.refusal for each in outcomes if each.refusal is not None]
    return f"refused: {refused}" if refused else None


class Steps:
    """Does steps on the groups of one episode."""

    def __init__(self, played: Sequence[Played], idents: Iterator[int], say: Say) -> None:
        self.folders: list[str] = []  # where checkpoints are
        self.hangs: list[str] = []  # what has outlived its bound, in words
        self._idents = idents
        self._say = say
        self._played = played
        self._kept: list[_Kept] = []

    @contextmanager
    def bound(self, what: str, seconds: float) -> Iterator[None]:
        """What must end within a time. Who watches from outside is told."""
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

    def submit(self, played: Played, sent: Sent, call: Callable[[Any, int], Any], role: str = "a") -> Any:
        """What the call gives; None where the group takes none any more."""
        assert played.group is not None
        played.sent.append(sent)
        sent.generation, sent.role = played.generation, role
        sent.submitted = time.monotonic()
        try:
            made = call(played.group.role(role), sent.ident)
        except Exception as error:
            sent.error, sent.settled = error, time.monotonic()
            return None
        sent.call = made if isinstance(made, colocate.Call) else colocate.Call(made._kept.call)
        return made

    def new(self, what: str, ranks: Sequence[int], timeout: float | None, **more: Any) -> Sent:
        return Sent(next(self._idents), what, tuple(ranks), timeout, lambda value: None, **more)

    def call(
        self,
        played: Played,
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

    def _role(self, played: Played, step: Step) -> tuple[str, tuple[int, ...]]:
        if step.role == "b" and played.second:
            return "b", played.second
        if step.role in TURNERS and played.budget:
            return step.role, tuple(range(played.slots))
        return "a", tuple(range(played.slots))

    def _plain(self, step: Step, played: Played, timeout: float | None, chosen: tuple[int, ...] = ()) -> Sent:
        role, slots = self._role(played, step)
        ranks = tuple(rank for rank in chosen if rank in slots) or slots
        payload = bytes(step.size)
        sent = self.call(played, "step", ranks, timeout, step.work_s, payload, role=role, chosen=ranks != slots)
        sent.expected = seen_by([(rank, mixed(sent.ident, rank, payload)) for rank in ranks])
        return sent

    # -- the steps

    def _step(self, step: Step, played: Played, timeout: float | None) -> Sent:
        sent = self._plain(step, played, timeout)
        self.wait(sent)
        return sent

    def _submit(self, step: Step, played: Played, timeout: float | None) -> Sent:
        return [self._plain(step, played, timeout) for _ in range(step.count)][-1]

    def _look(self, step: Step, played: Played, timeout: float | None) -> Sent:
        role, slots = self._role(played, step)
        sent = self.call(played, "look", slots, timeout, role=role)
        sent.expected = as_written(played, role, len(slots))
        return sent

    def _turns(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """Roles are called in the same order again and again; some calls write, and some don't."""
        for number in range(step.count):
            for place, role in enumerate(step.roles):
                one = self._look if (number + place) % 2 else self._plain
                sent = one(attrs.evolve(step, role=role), played, timeout)
        return sent

    def _rows(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """Rows that end one by one: of one call all together, of another one the first is read, and no others."""
        role, slots = self._role(played, step)
        numbers = list(range(4 * len(slots)))
        sent, half = self.new("play", slots, timeout), self.new("play", (), timeout)  # nobody knows where it has begun
        sent.expected = each_row(sent.ident, numbers)
        self.submit(
            played,
            sent,
            lambda view, ident: view.play.options(timeout=timeout).submit(numbers, ident, step.work_s),
            role,
        )

        def read_one(view: Any, ident: int) -> colocate.Call[Any]:
            at_most = (LONG_S if timeout is None else timeout) + STACKS_S
            with (
                self.bound("a row", at_most),
                view.play.options(timeout=timeout).stream(numbers * 10, ident, step.work_s) as rows,
            ):
                next(rows)
            return colocate.Call(rows._call)

        self.submit(played, half, read_one, role)
        return sent

    def _memory(self, step: Step, played: Played, timeout: float | None) -> Sent:
        self.settle(played.sent)
        sent = self.new("memory", (), timeout)
        sent.expected = within(played.budget)
        assert played.group is not None
        played.sent.append(sent)
        sent.generation, sent.submitted = played.generation, time.monotonic()
        with self.bound("memory()", LONG_S):
            try:
                sent.value = played.group.memory(LONG_S)
            except Exception as error:
                sent.error = error
        sent.settled = time.monotonic()
        return sent

    def _sync(self, step: Step, played: Played, timeout: float | None) -> None:
        self.settle(played.sent)

    def _checkpoint(self, step: Step, played: Played, timeout: float | None) -> None:
        assert played.group is not None
        self.settle(played.sent)
        tag = next(self._idents)
        self.folders.append(tempfile.mkdtemp())
        with self.bound("checkpoint", LONG_S):
            played.group.checkpoint(os.path.join(self.folders[-1], "saved"), tag)
        played.checkpoint, played.saved[tag] = tag, played.generation

    def _make(self, step: Step, played: Played, timeout: float | None) -> _Kept | None:
        slots = range(played.slots)
        sent = self.new("make", slots, timeout)
        resident = self.submit(
            played,
            sent,
            lambda view, ident: view.make.options(timeout=timeout).keep(ident, step.work_s, 2, step.size),
        )
        rows = [row(sent.ident, rank, index, step.size) for rank in slots for index in range(2)]
        # It stays where it is: whoever takes it looks.
        if resident is None:
            return None
        self._kept.append(_Kept(played, sent, resident, rows))
        return self._kept[-1]

    def _use(self, step: Step, played: Played, timeout: float | None) -> Sent | None:
        """Rows from all ranks to all ranks: worker to worker, but for each one's own."""
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

    def _pipeline(self, step: Step, played: Played, timeout: float | None) -> None:
        """Several calls in one message, the later ones with what the earlier ones give."""
        assert played.group is not None
        begun = len(played.sent)
        try:
            with played.group.pipeline():
                for _ in range(step.count):
                    self._plain(step, played, timeout)
                self._use(step, played, timeout)
        except Exception as error:  # it has failed meanwhile: none of them was sent
            for sent in played.sent[begun:]:
                sent.error, sent.settled, sent.call = error, time.monotonic(), None

    def _sleep(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """A role's memory goes to sleep; calls of it wake it."""
        return self._moved(step, played, timeout, start_sleep)

    def _wake(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """It comes back, ahead of calls; some of these come at once."""
        self._moved(step, played, timeout, start_sleep)
        self._plain(step, played, timeout)
        self._moved(step, played, timeout, start_sleep)
        return self._moved(step, played, timeout, start_wake)

    def _moved(self, step: Step, played: Played, timeout: float | None, move: Callable[..., Any]) -> Sent:
        group = played.group
        assert group is not None
        role, _ = self._role(played, step)
        sent = self.new(move.__name__.removeprefix("start_"), (), timeout)  # no rank notes it
        sent.expected = moved

        def later(view: Any, ident: int) -> colocate.Call[Any]:
            return colocate.Call(off_main(lambda: move(group._node, role, None, timeout)))

        self.submit(played, sent, later)
        return sent

    def _fail(self, step: Step, played: Played, timeout: float | None) -> Sent:
        role, slots = self._role(played, step)
        ranks = tuple(rank for rank in step.ranks if rank in slots) or slots[:1]
        return self.call(played, "fail", slots, timeout, step.work_s, ranks, role=role, fails=ranks)

    def _add(self, step: Step, played: Played, timeout: float | None, fails: tuple[int, ...] = ()) -> Sent:
        """A collective of all ranks."""
        slots = range(played.slots)
        sent = self.call(played, "add", slots, timeout, fails, fails=fails)
        total = sum(put_in(sent.ident, rank) for rank in slots)
        sent.expected = seen_by([(rank, total) for rank in slots])
        return sent

    def _add_failing(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """One in which some ranks raise while the others wait for them."""
        return self._add(step, played, timeout, tuple(rank for rank in step.ranks if rank < played.slots) or (0,))

    def _train(self, step: Step, played: Played, timeout: float | None) -> Sent:
        return [self._one_train(played, timeout) for _ in range(step.count)][-1]

    def _train_failing(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """Some that raise on some ranks, each with the next one behind it, which does it again."""
        for number in range(step.count):
            where = FREED[(FREED.index(step.where) + number) % len(FREED)]
            self._one_train(played, timeout, where, step.ranks)
            last = self._one_train(played, timeout)
        return last

    def _tear(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """One that raises on a rank when all others make their update, and what follows."""
        self.settle(played.sent)
        sent = self._one_train(played, timeout, "after", step.ranks[:1])
        for then in (self._one_train(played, timeout), self._plain(step, played, timeout)):
            self.wait(then)
        self.wait(sent)
        return sent

    def _one_train(self, played: Played, timeout: float | None, where: str = "", fails: Sequence[int] = ()) -> Sent:
        slots = tuple(range(played.slots))
        fails = tuple(rank for rank in fails if rank in slots)
        # The model knows what all steps before it have come to.
        return self.call(played, "train", slots, timeout, fails, where, role="t", fails=fails, where=where)
