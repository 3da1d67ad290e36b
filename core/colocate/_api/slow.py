"""A word about starts that take long, and calls and constructors that take suspiciously long.

Nothing has a deadline by default, but nothing hangs silently.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping

from colocate._api.starting import SlowStart
from colocate._calls.services import Services
from colocate._calls.stacks import Stacks
from colocate._crew.crew import Crew
from colocate._crew.workforce import Workforce
from colocate._system.limits import SLOW_EVERY_S, SLOW_S

_log = logging.getLogger("colocate")


class SlowCalls:
    """Looks now and then at each group's oldest call, or its start; warns once of each, with the late ranks' stacks."""

    def __init__(self, services: Services, crews: Mapping[str, Crew]) -> None:
        self._services = services
        self._crews = crews
        self._warned: weakref.WeakKeyDictionary[Crew, int] = weakref.WeakKeyDictionary()
        self._unbuilt: weakref.WeakSet[Workforce] = weakref.WeakSet()
        self._starts: dict[Workforce, SlowStart] = {}
        self._timer = services.timers.after(SLOW_EVERY_S, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = time.time()
        crews = list(self._crews.values())
        starting = [(crew, crew.workforce) for crew in crews if crew.life.is_starting]
        self._starts = {made: self._starts.get(made) or SlowStart(crew, made) for crew, made in starting}
        for start in self._starts.values():
            start.look()
        for crew in crews:
            oldest = next(iter(list(crew.order.pending.values())), None)
            if oldest is not None and now - oldest.submitted > SLOW_S and self._warned.get(crew) != oldest.seq:
                self._warned[crew] = oldest.seq
                self._warn(crew, f"{oldest.label} of group {crew.name!r} has been running", oldest.missing())
            workforce = crew.workforce
            if workforce not in self._unbuilt and (slots := workforce.constructing(SLOW_S)):
                self._unbuilt.add(workforce)
                self._warn(crew, f"the roles of group {crew.name!r} have been under construction", slots)
        self._timer = self._services.timers.after(SLOW_EVERY_S, self._look)

    def _warn(self, crew: Crew, what: str, slots: list[int]) -> None:
        def tell(stacks: Stacks) -> None:
            where = "\n".join(f"slot {slot}: {stacks.of(slot)}" for slot in slots)
            text = f"{what} for {SLOW_S:.0f} s\n{where}"
            self._services.printer.soon(lambda: _log.warning(text))

        crew.order.stacks.ask(slots, tell)
