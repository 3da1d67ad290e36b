"""The updates of a source since a role's last sync: a growing count shows a forgotten sync.

An update is a call in which an optimizer of torch's has made a step.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from colocate._role.context import Context, current
from colocate._system.imported import imported

_steps: WeakKeyDictionary[Context, int] = WeakKeyDictionary()
_hooks: list[Any] = []  # the hook of this process


@attrs.define(eq=False)
class SourceUpdates:
    """The updates of a source since a sync, on the driver.

    Attributes:
        source: The source's name in error texts.
        staleness: The number of updates that rows may be behind without a warning.
        times: The end of each update, in seconds of time.time().
    """

    source: str
    staleness: int
    times: list[float] = attrs.field(factory=list, init=False)

    def count(self, began: float) -> int:
        """Return the number of updates that ended before rows began: the rows are behind by this number."""
        return bisect_right(self.times, began)  # calls of a role end in order


def steps_of(ctx: Context) -> int:
    """Return the number of a role's optimizer steps since the first call of this function in the process."""
    if not _hooks and imported("torch") is not None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hooks.append(register_optimizer_step_post_hook(_count))
    return _steps.get(ctx, 0)


def _count(*args: Any) -> None:
    if (ctx := current()) is not None:
        _steps[ctx] = _steps.get(ctx, 0) + 1
