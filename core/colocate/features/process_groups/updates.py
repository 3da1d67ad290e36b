"""Counts each call's weight updates, in order to check that ranks with a shared model still have the same state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs


@attrs.define(eq=False)
class CallCounts:
    """The counts of operations, cuts and weight updates for one call."""

    operations: int = 0  # The number of operations on all process groups before the call.
    cuts: int = 0  # The number of cuts of process groups before the call.
    before: int = 0  # The role's own count of operations minus the process's count, before the call.
    step_events: int = 0  # The number of starts and ends of weight updates in the call.
    shares: bool = False  # Whether ranks share the updated weights.

    def shared_updates(self, operations: int) -> int:
        """Return the number of step events if ranks share the weights, otherwise 0. `operations` is the final count."""
        return self.step_events if self.shares or operations != self.operations else 0


def count_updates(running: Callable[[], CallCounts | None], operations: Callable[[], int]) -> None:
    """Start to count the weight updates of each call.

    Torch's hooks run before and after each step of any optimizer. Both are counted: an odd number shows a failure
    within a step. Weights are shared if the role has begun operations of process groups since the
    optimizer's last step, in this call or in earlier ones: one method may make gradients that another one uses.

    Args:
        running: Returns the counts of the current thread's call, or None.
        operations: Returns the number of operations of process groups that this process has begun.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    # The role's number of operations at the last step, by optimizer.
    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

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
