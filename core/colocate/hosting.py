"""Helpers for packages that host role objects outside of workers.

This module's contents may change with any version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from colocate._protocol.ledger import Purpose as Purpose, count_by_purpose as count_by_purpose
from colocate._role.context import (
    Context as Context,
    MeshPlace as MeshPlace,
    attach as attach,
    derive_seed as derive_seed,
    need_torch as need_torch,
    reset_current,
    set_current,
)
from colocate._role.role import find_own_method as find_own_method
from colocate.worker.holdings import (
    Storages as Storages,
    find_holdings as find_holdings,
    find_optimizers as find_optimizers,
)


@contextlib.contextmanager
def hosted(ctx: Context) -> Iterator[None]:
    """Run a block as code of a role, so that `colocate.context()` returns the role's context there."""
    token = set_current(ctx)
    try:
        yield
    finally:
        reset_current(token)
