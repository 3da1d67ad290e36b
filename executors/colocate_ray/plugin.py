"""Entry point of the Ray executor."""

from __future__ import annotations

from collections.abc import Sequence

from colocate import hookimpl
from colocate.executor import About, Executor, Running


@hookimpl
def colocate_executor() -> type[Executor]:
    """Return the class of the Ray executor."""
    from colocate_ray.executor import RayExecutor

    return RayExecutor


@hookimpl
def colocate_about() -> About:
    """Describe the executor for commands and error texts, without importing the executor."""
    joined = "ray with address=…"
    return About(
        capabilities={
            **dict.fromkeys(("Detachable", "Watchable", "Growing"), joined),
            **dict.fromkeys(("OwnProcess", "MultiNode", "SharedSlots", "Labelled"), "ray"),
        },
        distributions=("ray",),
        joins="address",
        packages=("colocate_ray",),
        left_here=_find_leftovers,
    )


def _find_leftovers() -> Sequence[Running]:
    from colocate_ray.leftovers import find_leftovers

    return find_leftovers()
