"""The judge: has programs played by drivers of its own, watches them from outside, and counts what came of it."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tests.chaos import marks
from tests.chaos.engine import Engine
from tests.chaos.ledger import Ledger
from tests.chaos.programs import KINDS, SLOTS, kind_of
from tests.chaos.watch import Ended, Hung, Watched

FREE_S = 2.0
"""All that a driver had is free so soon after its end."""
FREE_AT_LAST_S = 20.0
"""What is still there then is left behind."""
BURST = 3
"""So many drivers are killed together, so that their starts overlap."""
SHARED_SLOTS = BURST * SLOTS
ROUND = 12
"""So many programs of faults that a driver survives go before the next drivers are killed."""
_numbers = itertools.count(1)


def new_mark() -> str:
    """For the processes of one driver."""
    return f"{os.getpid()}-{next(_numbers)}"


@attrs.define(eq=False)
class Plan:
    """What is still to be played on one executor.

    Attributes:
        wanted: Faults of each kind.
        kinds: Those to play.
        seeds: Play exactly these instead.
        deadline: When to stop, in monotonic time.
    """

    executor: str
    ledger: Ledger
    wanted: int
    kinds: Sequence[str] = KINDS
    deadline: float = float("inf")
    torch: bool | None = None
    _taken: dict[str, int] = attrs.field(factory=dict)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def over(self, kinds: Sequence[str]) -> bool:
        """Whether nothing of these kinds is to be played any more."""
        return time.monotonic() > self.deadline or not self._open(kinds)

    def _open(self, kinds: Sequence[str]) -> list[str]:
        missing = {kind: self.wanted - self.ledger.tally(self.executor, kind).tried for kind in kinds}
        found = [kind for kind in kinds if kind in self.kinds and missing[kind] > 0]
        return sorted(found, key=lambda kind: -missing[kind])

    def next_seed(self, kinds: Sequence[str]) -> int | None:
        """A seed of the kind that lacks most, that hasn't been played on this executor."""
        with self._lock:
            if self.over(kinds):
                return None
            kind = self._open(kinds)[0]
            played = self.ledger.tally(self.executor, kind).seeds
            first = KINDS.index(kind)
            number = self._taken.get(kind, max(played, default=first - len(KINDS))) + len(KINDS)
            self._taken[kind] = number
            return number


@attrs.define(eq=False)
class Lane:
    """One driver that plays program after program, as long as it lasts."""

    engine: Engine
    ledger: Ledger
    tell: Callable[[str], None] = print
    env: dict[str, str] = attrs.field(factory=dict)
    _watched: Watched | None = None

    def play(self, seed: int, torch: bool | None = None) -> None:
        """Have a program played."""
        kind = kind_of(seed)
        try:
            watched = self._driver()
            watched.ask(seed=seed, torch=torch)
            while "program" not in (told := watched.hear()):
                self._note(seed, kind, told)
            self._note_words(seed, kind, told)
        except Hung as hung:
            self._hung(seed, kind, str(hung))
        except Ended as ended:
            self._problem(seed, kind, "wrong", str(ended))
            self.drop()
        with self.ledger.lock:
            self.ledger.tally(self.engine.executor, kind).seeds.append(seed)
        self.ledger.save()

    def _driver(self) -> Watched:
        if self._watched is None:
            self._watched = Watched.start(self.engine.executor, self.engine.options, new_mark(), **self.env)
            self._watched.hear()
        return self._watched

    def _note(self, seed: int, kind: str, told: dict[str, Any]) -> None:
        """What came of an episode."""
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
        self.tell(f"{self.engine.executor} seed {seed} ({kind}): {what}: {words}")
        self.ledger.problem(self.engine.executor, kind, seed, what, words)

    def _hung(self, seed: int, kind: str, what: str) -> None:
        assert self._watched is not None
        self._problem(seed, kind, "hangs", f"{what}\n{self._watched.stacks()}")
        self.drop()

    def drop(self) -> None:
        """End the driver by force, and whatever it has left, so that the next one finds room."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        watched.kill()
        watched.process.wait()
        _, left = marks.gone_within(watched.mark, (), FREE_AT_LAST_S)
        for pid in left:
            _end(pid)
        watched.clean()

    def close(self) -> None:
        """End the driver in order."""
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.end()


def _end(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


# -- SIGKILL of drivers


@attrs.define(eq=False)
class _Doomed:
    """A driver that is going to be killed."""

    seed: int
    watched: Watched
    killed: float = 0.0
    doing: str = ""
    children: list[int] = attrs.field(factory=list)


def burst(engine: Engine, ledger: Ledger, seeds: Sequence[int], tell: Callable[[str], None] = print) -> None:
    """Start drivers, kill them together while each is somewhere in its program, and look at what is left."""
    draw = random.Random(f"burst {seeds[0]}")
    doomed = [_Doomed(seed, Watched.start(engine.executor, engine.options, new_mark(), "endless")) for seed in seeds]
    for each in doomed:
        each.watched.ask(seed=each.seed)
    early = draw.random() < 0.15  # while some are still connecting
    try:
        if early:
            time.sleep(draw.uniform(0.05, 2.0))
        else:
            for each in doomed:
                told = each.watched.hear()
                each.children += [told["forked"]] if "forked" in told else []
            time.sleep(draw.uniform(0.0, 4.0))
    except (Ended, Hung) as error:
        for each in doomed:
            ledger.problem(
                engine.executor, "driver", each.seed, "wrong", f"a driver was not ready to be killed: {error}"
            )
    for each in doomed:
        each.doing = each.watched.begun
        each.killed = each.watched.kill()
    last = doomed[-1].killed
    for each in doomed:
        _, left = marks.gone_within(each.watched.mark, each.children, FREE_AT_LAST_S)
        _judge(engine, ledger, each, time.monotonic() - each.killed, left, tell)
    free_s, holders = engine.all_free()
    since = time.monotonic() - last
    if free_s is None:
        _told(engine, ledger, doomed[0], f"{since:.1f} s after the drivers' end not all is free: {holders}", tell)
    for each in doomed:
        with ledger.lock:
            tally = ledger.tally(engine.executor, "driver")
            tally.seeds.append(each.seed)
            if free_s:
                tally.free_ms[-1] = max(tally.free_ms[-1], round(since * 1000, 1))
        for pid in each.children:
            _end(pid)
        each.watched.process.wait()
        each.watched.clean()
    ledger.save()


def _judge(
    engine: Engine, ledger: Ledger, each: _Doomed, took: float, left: dict[int, str], tell: Callable[[str], None]
) -> None:
    problems = [f"process {pid} is left: {line}" for pid, line in left.items()]
    problems += [f"file {path.name} is left" for path in each.watched.folder.iterdir()]
    for words in problems:
        _told(engine, ledger, each, f"killed in {each.doing or 'between'!r}: {words}", tell)
    with ledger.lock:
        tally = ledger.tally(engine.executor, "driver")
        tally.tried += 1
        tally.survived += not problems
        tally.free_ms.append(round(took * 1000, 1))
        tally.count(_phase(each.doing))


def _phase(doing: str) -> str:
    """The thing that a driver was doing, in a word."""
    return doing.split()[0] if doing else "between"


def _told(engine: Engine, ledger: Ledger, each: _Doomed, words: str, tell: Callable[[str], None]) -> None:
    tell(f"{engine.executor} seed {each.seed} (driver): left: {words}")
    ledger.problem(engine.executor, "driver", each.seed, "left", words)


# -- all of it


def campaign(engine: Engine, plan: Plan, lanes: int, tell: Callable[[str], None] = print) -> None:
    """Play on one executor until there is enough of each kind, or no time."""
    drivers = [Lane(engine, plan.ledger, tell) for _ in range(lanes)]
    survivable = tuple(kind for kind in KINDS if kind != "driver")
    try:
        while not plan.over(KINDS):
            threads = [threading.Thread(target=_round, args=(lane, plan, survivable)) for lane in drivers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for _ in range(2):
                seeds = [seed for _ in range(BURST) if (seed := plan.next_seed(("driver",))) is not None]
                if seeds:
                    burst(engine, plan.ledger, seeds, tell)
    finally:
        for lane in drivers:
            lane.close()


def _round(lane: Lane, plan: Plan, kinds: Sequence[str]) -> None:
    for _ in range(ROUND):
        seed = plan.next_seed(kinds)
        if seed is None:
            return
        lane.play(seed, plan.torch)
