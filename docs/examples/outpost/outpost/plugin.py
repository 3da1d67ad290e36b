"""Entry point of the executor."""

from colocate import hookimpl
from colocate.executor import Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """The executor's class."""
    from outpost.executor import Outposts

    return Outposts
