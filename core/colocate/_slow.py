"""A word about calls that take suspiciously long: nothing has a deadline by default, but nothing hangs silently."""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup
    from colocate._order import PendingCall
    from colocate._runtime import Runtime

SLOW_S = 60.0
_LOOK_EVERY_S = 5.0
_log = logging.getLogger("colocate")


class SlowCalls:
    """Looks now and then at the oldest call of each group; warns once per call, with the late ranks' stacks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._warned: weakref.WeakKeyDictionary[ColocatedGroup, int] = weakref.WeakKeyDictionary()
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
                self._warn(group, oldest)
        self._timer = self._runtime.timers.after(_LOOK_EVERY_S, self._look)

    def _warn(self, group: ColocatedGroup, call: PendingCall) -> None:
        def tell(stacks: dict[int, str]) -> None:
            where = "\n".join(f"slot {slot} is {stack}" for slot, stack in sorted(stacks.items()))
            text = f"{call.label} of group {group.name!r} has been running for {SLOW_S:.0f} s\n{where}"
            self._runtime.printer.soon(lambda: _log.warning(text))

        group.order.ask_stacks(call.missing(), tell)
