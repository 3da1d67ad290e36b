"""verl on colocate: `COLOCATE_VERL=ray|dask|local`, or `colocate_verl.install(...)`, and verl's trainers run unchanged.

`driver` is the driver's half: slots, workers, calls. `groups` and `results` are its face: the classes and objects of
`verl.single_controller.ray`. `roles` is what is in the workers, and `private` has each name of verl's and of Ray's that
isn't public. `demo` is no part of that: it trains a tiny model by verl's trainers, on the CPU by a shim of its own.
"""

from typing import Any

import colocate

from . import private
from .driver import ENGINE

colocate.library(__name__)

__all__ = ["group_of", "install"]


def install(executor: str, **options: Any) -> None:
    """Have verl's worker groups of this process run on colocate.

    Args:
        executor: "ray", "dask" or "local".
        **options: For `colocate.connect`, of that executor. On Ray the cluster is that of `ray.init()`.

    Raises:
        ConfigError: There is no such executor, or a worker group is on another one already.
        CapabilityError: The installed verl isn't one that this plugin is for.
    """
    private.check_version()
    ENGINE.choose(executor, options)
    private.home()  # imports verl, which the faces need whole
    colocate.library(private.PASSED_BY)
    from . import groups, results

    private.replace(groups.FACES)
    private.patch(executor)
    results.patch(ENGINE.end)


def group_of(worker_group: Any) -> colocate.ColocatedGroup:
    """Return the group that a worker group of verl's stands for: its memory, its trace, and what of it sleeps."""
    found: colocate.ColocatedGroup = worker_group.workers[0].of.group
    return found
