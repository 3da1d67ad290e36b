"""Kill several drivers, each somewhere in its program, and check for leftovers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import attrs
from tests.chaos import marks
from tests.chaos.engine import Engine
from tests.chaos.ledger import Ledger
from tests.chaos.recorded import KEPT
from tests.chaos.watch import Ended, Hung, Watched

FREE_S = 2.0  # the bound until everything of a killed driver is free
FREE_AT_LAST_S = 20.0  # later leftovers count as permanent
BURST = 3  # drivers at once: a start takes seconds, most of these spent waiting
MOMENTS = ("start", "reserve", "reserve", "spawn", "spawn", "call", "call", "close", "close", "anything")
MOVES = "sleep", "wake"  # calls that are moments of their own, while a role's memory moves
_COMES_WITHIN_S = 15.0  # the wait for a driver's moment; after that any moment will do
_ASK_AGAIN_S = 0.02


@attrs.define(eq=False)
class Doomed:
    """A driver that is going to be killed."""

    seed: int  # of the program that the driver repeats
    moment: str  # the moment of the kill
    delay_s: float  # after the moment's begin
    watched: Watched
    killed: float = 0.0  # the time of the kill
    doing: str = ""  # the operation under way then
    gone_s: float = 0.0  # until no process and no reservation was left
    left: dict[int, str] = attrs.field(factory=dict)  # the processes left at last
    held: list[str] = attrs.field(factory=list)  # the reservations and actors left at last

    def meet(self, engine: Engine) -> None:
        """Kill the driver at the chosen moment, and wait until nothing is left."""
        watched = self.watched
        if self.moment == "start":
            time.sleep(self.delay_s * 20)
        else:
            watched.hear()
            deadline = time.monotonic() + _COMES_WITHIN_S
            while self.moment not in ("anything", _phase(watched.begun)) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(self.delay_s)
        self.doing = watched.begun
        self.killed = watched.kill()
        _, self.left = marks.gone_within(watched.mark, watched.forked, FREE_AT_LAST_S)
        while (held := engine.held_by(watched.process.pid)) and time.monotonic() - self.killed < FREE_AT_LAST_S:
            time.sleep(_ASK_AGAIN_S)
        self.held = held
        self.gone_s = time.monotonic() - self.killed


def _phase(doing: str) -> str:
    first = doing.split()[0] if doing else "between"
    return next((each for each in MOVES if f"({each} on" in doing), first)


def burst(engine: Engine, ledger: Ledger, seeds: Sequence[int]) -> None:
    """Start drivers, kill each at its moment, and check for leftovers on this machine and in the engine."""
    doomed: list[Doomed] = []
    wrong: list[str] = []
    for seed in seeds:
        draw = random.Random(f"death {seed}")
        moment, delay_s = draw.choice((*MOMENTS, *MOVES)), draw.choice((0.0, 0.001, 0.005, 0.02, 0.05, 0.1))
        watched = Watched.start(engine.executor, engine.options, marks.new(), "endless")
        watched.ask(seed=seed)
        doomed.append(Doomed(seed, moment, delay_s, watched))

    def meet(each: Doomed) -> None:
        try:
            each.meet(engine)
        except (Ended, Hung) as error:
            each.killed = each.watched.kill()
            wrong.append(f"it was not ready to be killed: {type(error).__name__} {error}")

    threads = [threading.Thread(target=meet, args=(each,)) for each in doomed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = max(doomed, key=lambda each: each.killed)
    free_s, holders = engine.all_free()
    for words in wrong:
        _problem(engine, ledger, last, "wrong", words)
    if free_s is None:
        since = time.monotonic() - last.killed
        _problem(engine, ledger, last, "left", f"{since:.1f} s after its end not all is free: {holders}")
    for each in doomed:
        _count(engine, ledger, each, survived=free_s is not None and not wrong)
        for pid in (*each.watched.forked, *each.left):
            marks.end(pid)
        each.watched.process.wait()
        each.watched.clean()
    ledger.save()


def _count(engine: Engine, ledger: Ledger, each: Doomed, survived: bool) -> None:
    problems = [f"process {pid} is left: {line}" for pid, line in each.left.items()]
    problems += [f"the engine has still {name}" for name in each.held]
    problems += [f"file {name} is left" for name in each.watched.files() if not name.startswith(KEPT)]
    for words in problems:
        _problem(engine, ledger, each, "left", words)
    if each.gone_s > FREE_S and not problems:
        print(f"{engine.executor} seed {each.seed} (driver): all was free only after {each.gone_s:.1f} s")
    with ledger.lock:
        tally = ledger.tally(engine.executor, "driver")
        tally.played(each.seed)
        tally.tried += 1
        tally.survived += survived and not problems
        tally.late += each.gone_s > FREE_S
        tally.free_ms.append(round(each.gone_s * 1000, 1))
        tally.count(_phase(each.doing))


def _problem(engine: Engine, ledger: Ledger, each: Doomed, what: str, words: str) -> None:
    ledger.problem(engine.executor, "driver", each.seed, what, f"killed in {each.doing or 'between'!r}: {words}")
