"""A word about calls and constructors that take suspiciously long.

Nothing has a deadline by default, but nothing hangs silently.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

from colocate._order import Stacks

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup
    from colocate._runtime import Runtime
    from colocate._workforce import Workforce

SLOW_S = 60.0
_LOOK_EVERY_S = 5.0
_log = logging.getLogger("colocate")


class SlowCalls:
    """Looks now and then at each group's oldest call, or its start; warns once of each, with the late ranks' stacks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._warned: weakref.WeakKeyDictionary[ColocatedGroup, int] = weakref.WeakKeyDictionary()
        self._unbuilt: weakref.WeakSet[Workforce] = weakref.WeakSet()
        self._timer = runtime.timers.after(_LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = time.time()
        for group in list(self._runtime.groups.values()):
            oldest = next(iter(list(group.order.pending.values())), None)
            if oldest is not None and now - oldest.submitted > SLOW_S and self._warned.get(group) != oldest.seq:
                self._warned[group] = oldest.seq
                self._warn(group, f"{oldest.label} of group {group.name!r} has been running", oldest.missing())
            workforce = group.workforce
            if workforce not in self._unbuilt and (slots := workforce.constructing(SLOW_S)):
                self._unbuilt.add(workforce)
                self._warn(group, f"the roles of group {group.name!r} have been under construction", slots)
        self._timer = self._runtime.timers.after(_LOOK_EVERY_S, self._look)

    def _warn(self, group: ColocatedGroup, what: str, slots: list[int]) -> None:
        def tell(stacks: Stacks) -> None:
            where = "\n".join(f"slot {slot}: {stacks.of(slot)}" for slot in slots)
            text = f"{what} for {SLOW_S:.0f} s\n{where}"
            self._runtime.printer.soon(lambda: _log.warning(text))

        group.order.ask_stacks(slots, tell)
