"""A driver that plays seeds from stdin: `python -m tests.chaos.driver EXECUTOR OPTIONS MARK [endless]`.

The driver reports each operation's begin with its bound, so that the watcher notices a hang, and each episode's result.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
from tests.chaos import marks, model, mutants
from tests.chaos.machine import CHILD
from tests.chaos.player import CLOSE_S, Player
from tests.chaos.programs import SLOTS, Episode, Program, program
from tests.chaos.records import Applied, Outcome
from tests.chaos.replayed import Replayer
from tests.chaos.steps import HANG_S

import colocate
from colocate import Pool, Runtime
from colocate.keeper import forks

RESERVE_S = 5.0
STARTS_S = 60.0  # the time for an engine to start the slots' holders, beside the wait for the slots
CONNECT_S = 60.0
GONE_S = 2.0
GONE_AT_LAST_S = 20.0


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def say_bound(what: str, seconds: float) -> None:
    """Report an operation's begin and bound, or with an empty name the operation's end."""
    say(begin=what, bound_s=seconds)


@contextmanager
def bound(what: str, seconds: float) -> Iterator[None]:
    say_bound(what, seconds)
    try:
        yield
    finally:
        say_bound("", 0.0)


@attrs.define(eq=False)
class Stage:
    """The runtime on which programs are played, one after the other."""

    executor: str
    options: dict[str, Any]
    mark: str
    runtime: Runtime | None = None
    held: Pool | None = None

    def open(self) -> Runtime:
        """Return the runtime; connect if there is none."""
        if self.runtime is None:
            with bound("connect", CONNECT_S):
                self.runtime = colocate.connect(self.executor, **self.options)
        return self.runtime

    def reserve(self, slots: int) -> Pool:
        runtime = self.open()
        with bound("reserve", RESERVE_S + STARTS_S):
            return runtime.reserve(slots, cpus=1, timeout=RESERVE_S, env={marks.MARK: self.mark})

    def pool(self) -> Pool:
        """Return the pool of all slots for this driver, which is reused until a program closes the pool."""
        if self.held is None:
            self.held = self.reserve(SLOTS)
        return self.held

    def let_go(self, grace: float) -> list[str]:
        held, self.held = self.held, None
        return [] if held is None else self.close(held, grace)

    def close(self, pool: Pool, grace: float) -> list[str]:
        """Close a pool without groups; return complaints, as neither an error nor a delay is allowed."""
        began = time.monotonic()
        try:
            with bound("close of an empty pool", grace + CLOSE_S):
                pool.close(grace)
        except BaseExceptionGroup as error:
            return [f"close of a pool without groups raised {error.exceptions!r}"]
        took = time.monotonic() - began
        return [f"close of a pool without groups took {took:.1f} s"] if took > grace + CLOSE_S + HANG_S else []

    def leave(self) -> list[str]:
        runtime, self.runtime = self.runtime, None
        if runtime is None:
            return []
        try:
            with bound("close of the runtime", CLOSE_S + 20.0):
                runtime.close(0.0)
        except BaseExceptionGroup as error:
            return [f"close of an empty runtime raised {error.exceptions!r}"]
        return []

    def own(self) -> set[int]:
        """Return the pids of this process and its runtime's helpers."""
        executor: Any = None if self.runtime is None else self.runtime._node.services.executor
        envoy = getattr(executor, "_envoy", None)
        found = {os.getpid(), *(() if envoy is None else (envoy._process.pid, envoy._janitor.pid))}
        return found if (template := forks._forks.current) is None else {*found, template.pid}


def play(stage: Stage, played: Program, episodes: int | None) -> None:
    idents = itertools.count(1)
    for episode in played.episodes[:episodes]:
        for player, outcome in perform(stage, stage.pool, episode, idents):
            tell(stage, player, outcome)
    say(program=played.seed, wrong=[], left=[], hangs=[])


def perform(
    stage: Stage, pool: Callable[[], Pool], episode: Episode, idents: Iterator[int]
) -> Iterator[tuple[Player, Outcome]]:
    """Play an episode, and the replay of the recording, if the episode has one."""
    player = Player(stage.open(), pool(), episode, idents, say_bound)
    yield player, player.play()
    if episode.replay is not None and player.recorded:
        replayer = Replayer(stage.open(), pool(), player.recorded[0], episode.replay, idents, say_bound)
        yield replayer, replayer.play()
    for recorded in player.recorded:
        recorded.forget()


def tell(stage: Stage, player: Player, outcome: Outcome) -> None:
    """Report an episode's result, and any slots and processes that aren't free again."""
    pool, episode = player.pool, player.episode
    wrong = model.complaints(outcome.played, outcome.applied)
    lost = outcome.applied is not None and outcome.applied.kind in ("keeper", "envoy")
    if outcome.pool_closed:
        stage.held = None
    else:
        wrong += _free(pool, _lost(pool, episode, outcome.applied))
        if lost:
            wrong += stage.let_go(episode.fault.grace)
    if outcome.applied is not None and outcome.applied.kind == "envoy":
        wrong += stage.leave()
    left = _left(stage) if outcome.pool_closed or lost else []
    if "child" in episode.rollout:
        left += _children(stage)
    say(
        target=episode.fault.target,
        moment=episode.fault.moment,
        applied=outcome.applied is not None,
        error_s=outcome.error_s,
        close_over_s=outcome.close_over_s,
        wrong=wrong,
        hangs=outcome.hangs,
        left=left,
    )


def rest(stage: Stage) -> None:
    """Release everything; report slots that can't be reserved again, and processes that are left."""
    wrong = stage.let_go(1.0)
    wrong += _all_free(stage)
    say(program=None, wrong=wrong, left=_left(stage), hangs=[])


def play_endlessly(stage: Stage, played: Program) -> None:
    """Play a program again and again until this process is killed; for some seeds fork a child that lives on."""
    if played.seed % 4 == 0:
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        say(forked=child)
    else:
        say(ready=os.getpid())
    while True:
        idents = itertools.count(1)
        pools = deque([stage.reserve(played.slots)])
        for episode in played.episodes:
            for _, outcome in perform(stage, partial(pools.__getitem__, -1), episode, idents):
                if outcome.pool_closed:
                    pools.append(stage.reserve(played.slots))
        stage.close(pools[-1], 0.2)


def _lost(pool: Pool, episode: Episode, applied: Applied | None) -> Collection[int]:
    """Return the slots that have lost their keeper by the fault, and stay lost."""
    if applied is None or applied.kind not in ("keeper", "envoy"):
        return ()
    if applied.kind == "envoy":
        return range(len(pool.slots))
    return (sum(episode.groups[: applied.group]) + applied.rank,)


def _free(pool: Pool, lost: Collection[int]) -> list[str]:
    """Return complaints about slots that aren't free after the close of their groups."""
    return [
        f"slot {slot.index} is still {slot.state} after the close"
        for slot in pool.slots
        if slot.state != "free" and not (slot.state == "lost" and slot.index in lost)
    ]


def _all_free(stage: Stage) -> list[str]:
    """Return a complaint unless all of this driver's slots can be reserved."""
    began = time.monotonic()
    try:
        stage.pool()
    except colocate.errors.PlacementError as error:
        return [f"not all slots are free after {time.monotonic() - began:.1f} s: {error}"]
    return stage.let_go(1.0)


def _left(stage: Stage) -> list[str]:
    """Return complaints about leftover processes of a closed pool."""
    took, left = marks.gone_within(stage.mark, stage.own(), GONE_AT_LAST_S)
    if left:
        return [f"process {pid} is left: {line}" for pid, line in left.items()]
    return [f"the last process went {took:.1f} s after the close"] if took > GONE_S else []


def _children(stage: Stage) -> list[str]:
    """Return complaints about leftover children of roles in closed groups."""
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid, line in marks.marked(stage.mark).items() if line == " ".join(CHILD)]:
        if time.monotonic() > deadline:
            return [f"child {pid} of a role is left" for pid in left]
        time.sleep(0.01)
    return []


def asked() -> Iterator[dict[str, Any]]:
    """Yield requests: a seed, whether to use process groups, and the number of episodes; or a rest."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)  # the process prints all stacks, and ends
    executor, options, mark, *endless = sys.argv[1:]
    os.environ[marks.MARK] = mark
    mutants.apply_from_environment()
    stage = Stage(executor, json.loads(options), mark)
    stage.open()
    if endless:
        play_endlessly(stage, program(executor, next(asked())["seed"]))
    say(ready=os.getpid())
    for told in asked():
        seed = told.get("seed")
        try:
            if seed is None:
                rest(stage)
            else:
                play(stage, program(executor, seed, told["torch"]), told["episodes"])
        except Exception as error:
            traceback.print_exc()
            words = f"the program ended with {type(error).__name__}: {error}"
            say(program=seed, wrong=[words], left=[], hangs=[], over=True)
            return
    stage.leave()


if __name__ == "__main__":
    main()
