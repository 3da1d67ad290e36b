"""Waiting for a death that comes from outside."""

from __future__ import annotations

from colocate import ColocatedGroup, WorkerDied
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import wait_until


def death_of(group: ColocatedGroup) -> WorkerDied:
    """The error with which a group's calls end, now or in a while."""
    errors: list[WorkerDied] = []

    def has_died() -> bool:
        try:
            group.role("echo", Echo).noop()
        except WorkerDied as error:
            errors.append(error)
        return bool(errors)

    wait_until(has_died, "the group has failed")
    return errors[0]
