"""`group.resize`: a group that has gone on with fewer slots has all of them again."""

from __future__ import annotations

from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError


def resize(worker_group: WorkerGroup, timeout: float | None) -> int:
    """Restart a group from its last checkpoint, if there are more slots for it now; return how many it has.

    Raises:
        ConfigError: It isn't restarted, or has no checkpoint.
        ColocateError: Calls are pending.
        TimeoutError: It isn't ready yet.
    """
    name, restarts = worker_group.name, worker_group.restarts
    if not restarts.limit:
        raise ConfigError(f"group {name!r} can't be resized: that is a restart, and it has on_failure='fail'")
    if has_more(worker_group):
        if restarts.checkpoint is None:
            raise ConfigError(f"group {name!r} can't be resized: there is no checkpoint to go on from; make one before")
        with restarts.writing:  # none is under way
            if pending := worker_group.unsettled():
                labels = ", ".join(dict.fromkeys(call.label for call in pending))
                raise ColocateError(f"group {name!r} can't be resized while calls are pending: {labels}")
            begin(worker_group)
        restarts.wait(timeout)
    return worker_group.size


def has_more(worker_group: WorkerGroup) -> bool:
    """Whether there are more slots for a group than it has. Lost ones are reserved again for that."""
    has = worker_group.size
    return has < len(worker_group.whole) and worker_group.home.regrow(worker_group) > has


def begin(worker_group: WorkerGroup) -> ColocateError | None:
    """Begin to restart a group with all slots that there are for it; return what whoever calls it is told."""
    worker_group.restarts.progressed()  # it is no try
    name = worker_group.name
    worker_group.fail(ColocateError(f"group {name!r} is resized: there are more slots for it", group=name))
    return worker_group.life.told()
