"""Run verl's trainers unchanged on colocate, by `COLOCATE_VERL=ray|dask|local` or `colocate_verl.install(...)`.

`driver` manages slots, workers and calls on the driver. `groups` and `results` replace the classes and objects of
`verl.single_controller.ray`. `roles` runs in the workers, and `private` lists all private names of verl and Ray. `demo`
isn't part of the plugin; it trains a tiny model with verl's trainers, on the CPU through a shim.
"""

from typing import Any

import colocate

from . import private
from .driver import ENGINE

colocate.library(__name__)

__all__ = ["group_of", "install"]


def install(executor: str, **options: Any) -> None:
    """Run verl's worker groups of this process on colocate.

    Args:
        executor: "ray", "dask" or "local".
        **options: Options of that executor for `colocate.connect`. On Ray the cluster is that of `ray.init()`.

    Raises:
        ConfigError: There is no such executor, or a worker group is on another one already.
        CapabilityError: The plugin doesn't support the installed verl.
    """
    private.check_version()
    ENGINE.choose_executor(executor, options)
    private.import_home()  # Imports verl completely, which `groups` and `results` need.
    colocate.library(private.PASSED_BY)
    from . import groups, results

    private.replace_objects(groups.REPLACEMENTS)
    private.patch_ray(executor)
    results.patch_ray(ENGINE.close_all)


def group_of(worker_group: Any) -> colocate.ColocatedGroup:
    """Return the colocate group of a verl worker group, for memory, traces and sleep."""
    group: colocate.ColocatedGroup = worker_group.workers[0].of.group
    return group
