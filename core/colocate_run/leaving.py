"""`Notices`: what of a run is to go, as cluster and batch system say. It is looked for beside the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from colocate.driver import Driver, Thread
from colocate.errors import ColocateError
from colocate_report.record import Leaving
from colocate_run.slurm import ends_at

LOOKS_S = 2.0
"""How often one looks."""

NOTICE_S = 600.0
"""An end that is known beforehand is noticed so long before, which is to be enough for a step and a checkpoint."""

_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class Notices:
    """What has been noticed in a run, soonest first. While entered, it is looked for."""

    _driver: Driver
    _told: Callable[[Leaving], object]  # on the looking thread
    found: tuple[Leaving, ...] = attrs.field(default=(), init=False)
    _saved: frozenset[str] = attrs.field(default=frozenset(), init=False)  # of whom a checkpoint has been written since
    _over: threading.Event = attrs.field(factory=threading.Event, init=False)

    def __enter__(self) -> Notices:
        if self._driver.foresees or ends_at() is not None:
            Thread(target=self._look, name="colocate-notices").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    @property
    def are_new(self) -> bool:
        """Whether there is one since which no checkpoint has been written."""
        return any(each.who not in self._saved for each in self.found)

    def saved(self, found: tuple[Leaving, ...]) -> None:
        """Hear that a checkpoint is written which was begun when these were known."""
        self._saved = frozenset(each.who for each in found)

    def _look(self) -> None:
        failed = False
        while True:
            try:
                self._note(self._driver.leaving())
                failed = False
            except ColocateError as error:  # whoever calls something is told that the cluster doesn't answer
                if not failed:
                    _log.info("which nodes are to go isn't known for now: %s", error)
                failed = True
            if self._over.wait(LOOKS_S):
                return

    def _note(self, nodes: Mapping[str, float | None]) -> None:
        found = [Leaving(f"node {name}", until) for name, until in nodes.items()]
        found += [] if (end := ends_at()) is None else [Leaving("the batch job", end)]
        found = [each for each in found if each.until is None or each.until - time.time() <= NOTICE_S]
        known, there = {each.who for each in self.found}, {each.who for each in found}
        self._saved &= there
        self.found = tuple(sorted(found, key=lambda each: (each.until or 0.0, each.who)))
        for each in self.found:
            if each.who not in known:
                _log.warning("%s: the job is to write a checkpoint", each)
                self._told(each)
