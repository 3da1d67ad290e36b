"""What hosts role objects elsewhere than in a worker, and what these hold: for packages beside core.

What this module offers may change with any version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from colocate._protocol.ledger import Purpose
from colocate._role.context import Context, MeshPlace, attach, derive_seed, need_torch, reset_current, set_current
from colocate.worker.memory.holdings import Storages, held_by, optimizers_of

__all__ = [
    "Context",
    "MeshPlace",
    "Purpose",
    "Storages",
    "attach",
    "derive_seed",
    "held_by",
    "hosted",
    "need_torch",
    "optimizers_of",
]


@contextlib.contextmanager
def hosted(ctx: Context) -> Iterator[None]:
    """Have the block's code run as that of a role: `colocate.context()` is its context."""
    token = set_current(ctx)
    try:
        yield
    finally:
        reset_current(token)
