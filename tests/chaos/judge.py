"""The judge: starts drivers that play programs, watches the drivers from outside, and counts the results."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs
from tests.chaos import deaths, marks
from tests.chaos.deaths import BURST, FREE_AT_LAST_S
from tests.chaos.engine import Engine
from tests.chaos.ledger import Ledger
from tests.chaos.programs import KINDS, SLOTS, kind_of
from tests.chaos.watch import Ended, Hung, Watched

SHARED_SLOTS = BURST * SLOTS
ROUND = 12  # the programs with survivable faults between two rounds of killed drivers


@attrs.define(eq=False)
class Plan:
    """The programs that remain to be played on one executor."""

    executor: str
    ledger: Ledger
    wanted: int  # faults of each kind
    kinds: Sequence[str] = KINDS  # the kinds to play
    deadline: float = float("inf")  # when to stop, in monotonic time
    _taken: dict[str, int] = attrs.field(factory=dict)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def over(self, kinds: Sequence[str]) -> bool:
        """Return whether no program of these kinds remains."""
        return time.monotonic() > self.deadline or not self._open(kinds)

    def _open(self, kinds: Sequence[str]) -> list[str]:
        missing = {kind: self.wanted - self.ledger.tally(self.executor, kind).tried for kind in kinds}
        found = [kind for kind in kinds if kind in self.kinds and missing[kind] > 0]
        return sorted(found, key=lambda kind: -missing[kind])

    def behind(self, kind: str, others: Sequence[str]) -> bool:
        """Return whether one kind has fewer faults than each other kind that is played."""
        tried = [self.ledger.tally(self.executor, other).tried for other in others if other in self.kinds]
        return not self.over((kind,)) and self.ledger.tally(self.executor, kind).tried < min([self.wanted, *tried])

    def next_seed(self, kinds: Sequence[str]) -> int | None:
        """Return an unplayed seed of the kind that lacks most; None if nothing remains."""
        with self._lock:
            if self.over(kinds):
                return None
            kind = self._open(kinds)[0]
            last = self.ledger.tally(self.executor, kind).last
            before = KINDS.index(kind) - len(KINDS) if last is None else last
            number = self._taken.get(kind, before) + len(KINDS)
            self._taken[kind] = number
            return number


class Enough(Exception):
    """A problem was found, and one is enough."""


@attrs.define(eq=False)
class Lane:
    """A driver that plays program after program; a new one replaces a lost one."""

    engine: Engine
    ledger: Ledger
    env: dict[str, str] = attrs.field(factory=dict)  # more environment of the driver
    first_only: bool = False  # whether to raise `Enough` at the first problem
    _watched: Watched | None = None
    _last: int = 0  # the last played seed

    def play(self, seed: int, torch: bool | None = None, episodes: int | None = None) -> None:
        kind = kind_of(seed)
        self._have(seed, kind, seed=seed, torch=torch, episodes=episodes)
        self._last = seed
        with self.ledger.lock:
            self.ledger.tally(self.engine.executor, kind).played(seed)
        self.ledger.save()

    def rest(self) -> None:
        if self._watched is not None:
            self._have(self._last, kind_of(self._last), rest=True)

    def _have(self, about: int, kind: str, **what: Any) -> None:
        try:
            watched = self._driver()
            watched.ask(**what)
            while "program" not in (told := watched.hear()):
                self._note(about, kind, told)
            self._note_words(about, kind, told)
            if told.get("over"):
                self.drop()
        except Hung as hung:
            self._hung(about, kind, str(hung))
        except Ended as ended:
            self._problem(about, kind, "wrong", str(ended))
            self.drop()

    def _driver(self) -> Watched:
        if self._watched is None:
            self._watched = Watched.start(self.engine.executor, self.engine.options, marks.new(), **self.env)
            self._watched.hear()
        return self._watched

    def _note(self, seed: int, kind: str, told: dict[str, Any]) -> None:
        tally = self.ledger.tally(self.engine.executor, kind)
        bad = self._note_words(seed, kind, told)
        with self.ledger.lock:
            if told["applied"]:
                tally.tried += 1
                tally.survived += not bad
                tally.count(told["target"] or told["moment"])
            if told["error_s"] is not None and (kind == "kill" or told["target"] == "lane"):
                tally.error_ms.append(round(told["error_s"] * 1000, 1))
            if told["close_over_s"] is not None:
                tally.over_ms.append(round(told["close_over_s"] * 1000, 1))

    def _note_words(self, seed: int, kind: str, told: dict[str, Any]) -> bool:
        for what in ("wrong", "hangs", "left"):
            for words in told[what]:
                self._problem(seed, kind, what, words)
        return any(told[what] for what in ("wrong", "hangs", "left"))

    def _problem(self, seed: int, kind: str, what: str, words: str) -> None:
        self.ledger.problem(self.engine.executor, kind, seed, what, words)
        if self.first_only:
            raise Enough(words)

    def _hung(self, seed: int, kind: str, what: str) -> None:
        assert self._watched is not None
        try:
            self._problem(seed, kind, "hangs", f"{what} outlives its bound\n{self._watched.stacks()}")
        finally:
            self.drop()

    def drop(self) -> None:
        """Kill the driver and its leftover processes, so that the next driver finds room."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        watched.kill()
        watched.process.wait()
        _, left = marks.gone_within(watched.mark, (), FREE_AT_LAST_S)
        for pid in left:
            marks.end(pid)
        watched.clean()

    def close(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            for name in watched.end():
                self._problem(self._last, kind_of(self._last), "left", f"file {name} is left")


def campaign(engine: Engine, plan: Plan, lanes: int) -> None:
    """Play on one executor until each kind has enough faults, or the time is up."""
    drivers = [Lane(engine, plan.ledger) for _ in range(lanes)]
    survivable = tuple(kind for kind in KINDS if kind != "driver")
    try:
        while not plan.over(KINDS):
            threads = [threading.Thread(target=_round, args=(lane, plan, survivable)) for lane in drivers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while plan.behind("driver", survivable):
                seeds = [seed for _ in range(BURST) if (seed := plan.next_seed(("driver",))) is not None]
                if seeds:  # otherwise the time is just up
                    deaths.burst(engine, plan.ledger, seeds)
    finally:
        for lane in drivers:
            lane.close()


def _round(lane: Lane, plan: Plan, kinds: Sequence[str]) -> None:
    for _ in range(ROUND):
        seed = plan.next_seed(kinds)
        if seed is None:
            break
        lane.play(seed)
    lane.rest()
