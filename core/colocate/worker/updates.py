"""How many updates of weights a call has made: what tells whether ranks that share a model still have one state.

Torch tells before and after each step of any optimizer. Both are counted, so that who fails within one is seen as that:
its number is odd. The weights are shared where the role has begun operations of process groups since the optimizer's
last step, in this call or in earlier ones: gradients may be made by one method and used by another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from colocate._role.context import CallState, running_call


def count_updates(last: Callable[[], CallState | None], operations: Callable[[], int]) -> None:
    """Count in each call from now on.

    Args:
        last: The call that a thread works for which has none of its own.
        operations: How many operations of process groups this process has begun.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by the role, at the last step

    def before(optimizer: Any, *_: Any) -> None:
        call = running_call.get() or last()
        if call is not None:
            call.halves += 1
            call.shares = call.shares or call.before + operations() != begun.get(optimizer, 0)

    def after(optimizer: Any, *_: Any) -> None:
        call = running_call.get() or last()
        if call is not None:
            call.halves += 1
            begun[optimizer] = call.before + operations()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
