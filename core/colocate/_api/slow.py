"""Warnings about slow starts, and about suspiciously slow calls and constructors.

Nothing has a deadline by default, but nothing hangs silently.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import attrs

from colocate._calls.order import Stacks
from colocate._calls.services import Services
from colocate._system.limits import SLOW_EVERY_S, SLOW_S, STARTING_S
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Workforce

_log = logging.getLogger("colocate")
_NAMED = 8  # A report lists up to 8 workers by number.


class SlowCalls:
    """A timer that warns of slow calls, constructors and starts of all groups, with the stacks of the late ranks."""

    def __init__(self, services: Services, worker_groups: Mapping[str, WorkerGroup]) -> None:
        self._services = services
        self._worker_groups = worker_groups
        self._warned: weakref.WeakKeyDictionary[WorkerGroup, dict[str, int]] = weakref.WeakKeyDictionary()
        self._unbuilt: weakref.WeakSet[Workforce] = weakref.WeakSet()
        self._starts: dict[Workforce, SlowStart] = {}
        self._timer = services.timers.call_later(SLOW_EVERY_S, self._check_calls)

    def close(self) -> None:
        self._timer.cancel()

    def _check_calls(self) -> None:
        now = time.time()
        worker_groups = list(self._worker_groups.values())
        starting = [
            (worker_group, worker_group.workforce)
            for worker_group in worker_groups
            if worker_group.life.is_starting and not worker_group.stopped_slots()
        ]
        self._starts = {
            crew: self._starts.get(crew) or SlowStart(worker_group, crew) for worker_group, crew in starting
        }
        for start in self._starts.values():
            start.report_progress()
        for worker_group in worker_groups:
            warned = self._warned.setdefault(worker_group, {})
            for oldest in worker_group.order.oldest_calls():
                if now - oldest.moved <= SLOW_S or warned.get(oldest.lane) == oldest.seq:
                    continue
                if now - oldest.moved - worker_group.paused_seconds(oldest.moved) > SLOW_S:
                    warned[oldest.lane] = oldest.seq
                    subject = f"{oldest.label} of group {worker_group.name!r} has been running"
                    if worker_group.is_paused(oldest.lane):
                        subject = (
                            f"{oldest.label} of group {worker_group.name!r} isn't done, and role {oldest.lane!r} is "
                            f"paused until group.resume({oldest.lane!r}); it has been so"
                        )
                    self._warn(worker_group, subject, oldest.missing_slots())
            workforce = worker_group.workforce
            if workforce not in self._unbuilt and (slots := workforce.find_constructing(SLOW_S)):
                self._unbuilt.add(workforce)
                self._warn(
                    worker_group, f"the roles of group {worker_group.name!r} have been under construction", slots
                )
        self._timer = self._services.timers.call_later(SLOW_EVERY_S, self._check_calls)

    def _warn(self, worker_group: WorkerGroup, what: str, slots: list[int]) -> None:
        def tell(stacks: Stacks) -> None:
            where = "\n".join(f"slot {slot}: {stacks.describe_slot(slot)}" for slot in slots)
            text = f"{what} for {SLOW_S:.0f} s\n{where}"
            self._services.printer.call_soon(lambda: _log.warning(text))

        worker_group.order.stacks.ask_stacks(slots, tell)


@attrs.define(eq=False)
class SlowStart:
    """The progress of one start of a group's workers, for reports of slow steps such as imports.

    Attributes:
        steps: Each slot's current step, and the time of its begin.
        last_report: The last report's steps, and the age of the start then.
    """

    worker_group: WorkerGroup
    workforce: Workforce
    steps: dict[int, tuple[str, float]] = attrs.field(factory=dict)
    last_report: tuple[set[str], float] = (set(), 0.0)

    def report_progress(self) -> None:
        """Log slow steps of starting workers: new steps at once, unchanged steps when the start's age has doubled."""
        slots = self.workforce.find_starting(STARTING_S)
        heard = [slot for slot in slots if self.workforce.workers[slot].hello is not None]
        if slots:
            self.worker_group.order.stacks.ask_stacks(heard, partial(self._log_steps, slots, heard))

    def _log_steps(self, slots: list[int], heard: list[int], stacks: Stacks) -> None:
        now, since = time.time(), self.workforce.began
        slow_steps: dict[str, list[int]] = defaultdict(list)
        for slot in slots:
            step = "starting its process"
            if slot in heard:  # The first line of a stack names the step.
                constructor, importing, module = stacks.describe_slot(slot).partition("\n")[0].partition(", importing ")
                constructor = constructor.removeprefix("running ")
                if not importing and constructor == "nothing":  # The worker waits for other workers to start.
                    continue
                step = f"importing {module}" if importing else constructor
            before = self.steps.get(slot)
            if before is None or before[0] != step:
                self.steps[slot] = step, since if before is None else now
            if now - self.steps[slot][1] > STARTING_S:
                slow_steps[step].append(slot)
        last_steps, age = self.last_report
        if slow_steps and (slow_steps.keys() != last_steps or now - since >= 2 * age):
            self.last_report = set(slow_steps), now - since
            for step, step_slots in slow_steps.items():
                spent = now - min(self.steps[slot][1] for slot in step_slots)
                workers_text = f"worker{'s' if len(step_slots) > 1 else ''} {', '.join(map(str, step_slots))}"
                if len(step_slots) > _NAMED:
                    workers_text = f"{len(step_slots)} workers"
                text = f"[colocate] group {self.worker_group.name!r} starts: {step}: {spent:.0f} s on {workers_text}"
                self.worker_group.services.printer.print_line(text)
