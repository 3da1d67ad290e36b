"""Entry point of the Dask executor."""

from __future__ import annotations

from colocate import hookimpl
from colocate.executor import Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """The executor's class."""
    from colocate_dask.executor import DaskExecutor

    return DaskExecutor
