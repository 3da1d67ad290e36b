"""How many updates of weights a process has made: what tells whether ranks that share a model still have one state.

Torch tells before and after each step of any optimizer. Both are counted, so that who fails within one is seen as that:
its number is odd.
"""

from __future__ import annotations

from typing import Any

_halves = 0  # of this process; steps of one worker run one after the other, on its lane


def count_updates() -> None:
    """Count from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_note)
    register_optimizer_step_post_hook(_note)


def halves() -> int:
    """How many beginnings and ends of updates there were."""
    return _halves


def _note(*_: Any) -> None:
    global _halves  # the process's, as torch's hooks are
    _halves += 1
