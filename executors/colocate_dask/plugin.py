"""Entry point of the Dask executor."""

from __future__ import annotations

from collections.abc import Sequence

from colocate import hookimpl
from colocate.executor import About, Executor, Running


@hookimpl
def colocate_executor() -> type[Executor]:
    """Return the class of the Dask executor."""
    from colocate_dask.executor import DaskExecutor

    return DaskExecutor


@hookimpl
def colocate_about() -> About:
    """Describe the executor for commands and error texts, without importing the executor."""
    joined = "dask with address=…"
    return About(
        capabilities={
            **dict.fromkeys(("Detachable", "Watchable", "Labelled", "Growing"), joined),
            **dict.fromkeys(("OwnProcess", "MultiNode", "SharedSlots"), "dask"),
        },
        distributions=("distributed",),
        joins="address",
        packages=("colocate_dask",),
        left_here=_find_leftovers,
    )


def _find_leftovers() -> Sequence[Running]:
    from colocate_dask.scratch import find_leftovers

    return find_leftovers()
