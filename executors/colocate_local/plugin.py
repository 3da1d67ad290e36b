"""Entry point of the embedded executor."""

from __future__ import annotations

from colocate import hookimpl
from colocate.executor import About, Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """Return the executor's class."""
    from colocate_local.local import Local

    return Local


@hookimpl
def colocate_about() -> About:
    """Describe this executor for commands and errors, without an import of the executor."""
    return About(
        capabilities={"OwnProcess": "local with processes=True", "SharedSlots": "local"}, packages=("colocate_local",)
    )
