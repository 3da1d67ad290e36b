"""The steps of a program: each makes calls, and notes what the model must know of them."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from tests.chaos.calls import LONG_S, Caller, Say
from tests.chaos.machine import mixed, put_in, row
from tests.chaos.model import as_written, seen_by, within
from tests.chaos.programs import FREED, TURNERS, Step
from tests.chaos.records import Played, Sent

import colocate
from colocate._signals.off_main import off_main
from colocate._views.sleeping import start_sleep, start_wake


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


class Steps(Caller):
    """Does steps on the groups of one episode."""

    def __init__(self, played: Sequence[Played], idents: Iterator[int], say: Say) -> None:
        super().__init__(idents, say)
        self.folders: list[str] = []  # where checkpoints are
        self._played = played
        self._kept: list[_Kept] = []

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
        sent = self.new("step", ranks, timeout)
        sent.expected = seen_by([(rank, mixed(sent.ident, rank, payload)) for rank in ranks])
        options: dict[str, Any] = {"ranks": list(ranks)} if ranks != slots else {}
        self.submit(
            played,
            sent,
            lambda view, ident: view.step.options(timeout=timeout, **options).submit(ident, step.work_s, payload),
            role,
        )
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
        sent = self.new("look", slots, timeout)
        sent.expected = as_written(played, role, len(slots))
        self.submit(played, sent, lambda view, ident: view.look.options(timeout=timeout).submit(ident), role)
        return sent

    def _turns(self, step: Step, played: Played, timeout: float | None) -> Sent:
        """Roles are called in the same order again and again; some calls write, and some don't."""
        for number in range(step.count):
            for place, role in enumerate(step.roles):
                one = self._look if (number + place) % 2 else self._plain
                sent = one(attrs.evolve(step, role=role), played, timeout)
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
        sent.expected = lambda value: None  # it stays where it is: whoever takes it looks
        if resident is None:
            return None
        self._kept.append(_Kept(played, sent, resident, rows))
        return self._kept[-1]

    def _use(self, step: Step, played: Played, timeout: float | None) -> Sent | None:
        """Rows from all ranks to all ranks: worker to worker, but for each one's own."""
        kept = self._make(step, played, timeout)
        return None if kept is None else self._take(step, played, timeout, kept)

    def _take(self, step: Step, played: Played, timeout: float | None, kept: _Kept) -> Sent:
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
        sent = self.new("fail", slots, timeout, fails=ranks)
        self.submit(
            played,
            sent,
            lambda view, ident: view.fail.options(timeout=timeout).submit(ident, step.work_s, ranks),
            role,
        )
        return sent

    def _add(self, step: Step, played: Played, timeout: float | None, fails: tuple[int, ...] = ()) -> Sent:
        """A collective of all ranks."""
        slots = range(played.slots)
        sent = self.new("add", slots, timeout, fails=fails)
        total = sum(put_in(sent.ident, rank) for rank in slots)
        sent.expected = seen_by([(rank, total) for rank in slots])
        self.submit(played, sent, lambda view, ident: view.add.options(timeout=timeout).submit(ident, fails))
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
        sent = self.new("train", slots, timeout, fails=fails, where=where)
        sent.expected = lambda value: None  # the model knows what all steps before it have come to
        self.submit(
            played, sent, lambda view, ident: view.train.options(timeout=timeout).submit(ident, fails, where), "t"
        )
        return sent
