"""Count the updates of a source since a role's last sync. A growing count reveals a forgotten sync.

An update is a call in which a torch optimizer has made a step.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from colocate._role.context import Context, current
from colocate._system.imported import find_imported

_steps: WeakKeyDictionary[Context, int] = WeakKeyDictionary()
_hooks: list[Any] = []  # Holds this process's hook, once registered.


@attrs.define(eq=False)
class SourceUpdates:
    """The driver's record of a source's updates since a sync.

    Attributes:
        source: The source's name in error texts.
        staleness: The number of updates that rows may be behind without a warning.
        times: The end of each update, in seconds of time.time().
    """

    source: str
    staleness: int
    times: list[float] = attrs.field(factory=list, init=False)

    def count_before(self, began: float) -> int:
        """Return the number of updates that ended before rows began, which is the lag of the rows."""
        return bisect_right(self.times, began)  # The times are sorted, because calls of a role end in order.


def count_steps(ctx: Context) -> int:
    """Return the number of a role's optimizer steps since the first call of this function in the process."""
    if not _hooks and find_imported("torch") is not None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hooks.append(register_optimizer_step_post_hook(_count_step))
    return _steps.get(ctx, 0)


def _count_step(*args: Any) -> None:
    if (ctx := current()) is not None:
        _steps[ctx] = _steps.get(ctx, 0) + 1
