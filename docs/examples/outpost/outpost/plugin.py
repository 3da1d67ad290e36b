"""Entry point of the executor. It imports the executor only when asked for it."""

from colocate import hookimpl
from colocate.executor import About, Executor


@hookimpl
def colocate_executor() -> type[Executor]:
    """The executor's class."""
    from outpost.executor import Outposts

    return Outposts


@hookimpl
def colocate_about() -> About:
    """What is said of it as long as nobody uses it."""
    return About(
        capabilities=dict.fromkeys(("OwnProcess", "MultiNode", "SharedSlots"), "outpost"), packages=("outpost",)
    )
