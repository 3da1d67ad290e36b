"""A helper that waits for the death of a worker."""

from __future__ import annotations

from colocate import ColocatedGroup, WorkerDied
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import wait_until


def death_of(group: ColocatedGroup) -> WorkerDied:
    """Wait for the WorkerDied error of a group's calls, and return it."""
    errors: list[WorkerDied] = []

    def has_died() -> bool:
        try:
            group.role("echo", Echo).noop()
        except WorkerDied as error:
            errors.append(error)
        return bool(errors)

    wait_until(has_died, "the group has failed")
    return errors[0]
