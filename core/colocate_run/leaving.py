"""Watch for announced losses on a separate thread: nodes that the cluster will remove, and the batch job's end."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

import attrs

from colocate.driver import Driver, Thread
from colocate.errors import ColocateError
from colocate_report.record import Leaving
from colocate_run.slurm import ask_end, find_end, has_job

LOOKS_S = 2.0
"""Seconds between two checks for notices."""

NOTICE_S = 600.0
"""Seconds before a known end at which a notice is given: enough for a step and a checkpoint."""

_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class Notices:
    """The notices of losses that a run has received. In its block, a thread looks for new notices.

    Attributes:
        departures: The announced losses, soonest first.
        last_number: The number of notices so far. A checkpoint answers all earlier notices.
    """

    _driver: Driver
    _on_notice: Callable[[Leaving], object]  # Called with each new notice, on the watching thread.
    departures: tuple[Leaving, ...] = attrs.field(default=(), init=False)
    last_number: int = attrs.field(default=0, init=False)
    # The end of the batch job, as a time of `time.time()`.
    _ends_at: float | None = attrs.field(factory=find_end, init=False)
    # Times of signals, or None to stop the thread. A SimpleQueue's `put` is safe in a signal handler.
    _signals: queue.SimpleQueue[float | None] = attrs.field(factory=queue.SimpleQueue, init=False)

    def __enter__(self) -> Notices:
        if self._driver.foresees or self._ends_at is not None or has_job():
            Thread(target=self._poll, name="colocate-notices").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._signals.put(None)

    def on_signal(self) -> None:
        """Ask the batch system when the job will end.

        This is safe in a signal handler, because another thread asks and logs the answer.
        """
        if has_job():
            self._signals.put(time.time())

    def _poll(self) -> None:
        failed = False
        while True:
            try:
                self._update_departures(self._driver.leaving())
                failed = False
            except ColocateError as error:  # The job's next call reports a failure of the cluster.
                if not failed:
                    _log.info("which nodes are to go isn't known for now: %s", error)
                failed = True
            try:
                signalled = self._signals.get(timeout=LOOKS_S)
            except queue.Empty:
                continue
            if signalled is None:
                return
            self._ends_at, message = ask_end(signalled)
            if message is not None:
                _log.warning("%s", message)

    def _update_departures(self, nodes: Mapping[str, float | None]) -> None:
        departures = [Leaving(f"node {name}", until) for name, until in nodes.items()]
        departures += [] if self._ends_at is None else [Leaving("the batch job", self._ends_at)]
        departures = [each for each in departures if each.until is None or each.until - time.time() <= NOTICE_S]
        departures.sort(key=lambda each: (each.until or 0.0, each.who))
        known = {each.who for each in self.departures}
        new = [each for each in departures if each.who not in known]
        self.departures, self.last_number = tuple(departures), self.last_number + len(new)
        for each in new:
            _log.warning("%s: the job should write a checkpoint now", each)
            self._on_notice(each)
