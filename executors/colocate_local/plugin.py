"""Entry point of the embedded executor."""

from __future__ import annotations

from colocate import hookimpl
from colocate.executor import Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """The executor's class."""
    from colocate_local.local import Local

    return Local
