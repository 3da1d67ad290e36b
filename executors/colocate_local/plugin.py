"""Entry point of the local executor."""

from __future__ import annotations

from colocate import hookimpl
from colocate.executor import About, Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """Return the class of the local executor."""
    from colocate_local.local import Local

    return Local


@hookimpl
def colocate_about() -> About:
    """Describe the executor for commands and error texts, without importing the executor."""
    return About(
        capabilities={"OwnProcess": "local with processes=True", "SharedSlots": "local"}, packages=("colocate_local",)
    )
