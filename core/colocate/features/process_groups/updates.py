"""How many updates of weights calls make: that tells whether ranks which share a model still have one state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs


@attrs.define(eq=False)
class Counts:
    """What is counted of a call."""

    operations: int = 0  # of process groups that came before it
    cuts: int = 0  # how often some had been cut before it
    before: int = 0  # what its role has begun of operations is this and what the groups count
    step_events: int = 0  # beginnings and ends of updates of weights in it
    shares: bool = False  # whether they are of weights that ranks share

    def updates(self, operations: int) -> int:
        """Return those of weights that ranks share: else nobody compares them; `operations` as there are after it."""
        return self.step_events if self.shares or operations != self.operations else 0


def count_updates(running: Callable[[], Counts | None], operations: Callable[[], int]) -> None:
    """Count in each call, from now on, how many updates of weights it has made.

    Torch tells before and after each step of any optimizer. Both are counted, so that who fails within one is seen as
    that: its number is odd. The weights are shared where the role has begun operations of process groups since the
    optimizer's last step, in this call or in earlier ones: gradients may be made by one method and used by another.

    Args:
        running: Returns what is counted of the call that a thread works for.
        operations: How many operations of process groups this process has begun.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by the role, at the last step

    def before(optimizer: Any, *_: Any) -> None:
        counts = running()
        if counts is not None:
            counts.step_events += 1
            counts.shares = counts.shares or counts.before + operations() != begun.get(optimizer, 0)

    def after(optimizer: Any, *_: Any) -> None:
        counts = running()
        if counts is not None:
            counts.step_events += 1
            begun[optimizer] = counts.before + operations()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
