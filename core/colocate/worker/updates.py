"""How many updates of weights a call has made: what tells whether ranks that share a model still have one state.

Torch tells before and after each step of any optimizer. Both are counted, so that who fails within one is seen as that:
its number is odd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from colocate._role.context import CallState, running_call


def count_updates(last: Callable[[], CallState | None]) -> None:
    """Count in each call from now on.

    Args:
        last: The call that a thread works for which has none of its own.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(partial(_note, last))
    register_optimizer_step_post_hook(partial(_note, last))


def _note(last: Callable[[], CallState | None], *_: Any) -> None:
    call = running_call.get() or last()
    if call is not None:
        call.halves += 1
