"""What a group is doing while it starts, said once that takes long: imports and large models do."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import attrs

from colocate._calls.stacks import Stacks
from colocate._crew.crew import Crew
from colocate._crew.workforce import Workforce
from colocate._system.limits import STARTING_S

_NAMED = 8  # so many workers at most


@attrs.define(eq=False)
class SlowStart:
    """That of one generation of a group's workers.

    Attributes:
        steps: What the worker of each slot is at, and since when.
        said: What was said last, without times, and how old the start was.
    """

    crew: Crew
    workforce: Workforce
    steps: dict[int, tuple[str, float]] = attrs.field(factory=dict)
    said: tuple[set[str], float] = (set(), 0.0)

    def look(self) -> None:
        """Find out what those that aren't ready do, and say that, if it is new or has taken twice as long."""
        slots = self.workforce.starting(STARTING_S)
        heard = [slot for slot in slots if self.workforce.workers[slot].hello is not None]
        if slots:
            self.crew.order.stacks.ask(heard, partial(self._tell, slots, heard))

    def _tell(self, slots: list[int], heard: list[int], stacks: Stacks) -> None:
        now, since = time.time(), self.workforce.began
        found: dict[str, list[int]] = defaultdict(list)
        for slot in slots:
            step = _step(stacks.of(slot)) if slot in heard else "starting its process"
            if step is None:  # it waits for others to start
                continue
            before = self.steps.get(slot)
            if before is None or before[0] != step:
                self.steps[slot] = step, since if before is None else now
            if now - self.steps[slot][1] > STARTING_S:
                found[step].append(slot)
        words, age = self.said
        if found and (found.keys() != words or now - since >= 2 * age):
            self.said = set(found), now - since
            for step, those in found.items():
                spent = now - min(self.steps[slot][1] for slot in those)
                text = f"[colocate] group {self.crew.name!r} starts: {step}: {spent:.0f} s on {_workers(those)}"
                self.crew.services.printer.line(text)


def _step(stack: str) -> str | None:
    """What a worker does, by the first line of its stack; None for nothing."""
    what = stack.partition("\n")[0].removeprefix("running ")
    constructor, found, module = what.partition(", importing ")
    return f"importing {module}" if found else None if constructor == "nothing" else constructor


def _workers(slots: Iterable[int]) -> str:
    numbers = [str(slot) for slot in slots]
    if len(numbers) > _NAMED:
        return f"{len(numbers)} workers"
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
