"""Errors that only follow from something else: what their caller is told is that, not these."""

from __future__ import annotations

from colocate.errors import (
    ColocateError,
    ConfigError,
    DispatchError,
    MemoryBudgetError,
    ReplayError,
    RoleError,
    SerializationError,
    SleepingError,
    StaleWeightsError,
    WeightsDifferError,
)

OWN_WORDS = (
    ConfigError,
    DispatchError,
    MemoryBudgetError,
    ReplayError,
    RoleError,
    SerializationError,
    SleepingError,
    StaleWeightsError,
    WeightsDifferError,
)
"""Errors that are colocate's words wherever role code hasn't raised them: the caller is told them as they are."""


class Consequence(ColocateError):
    """Another rank's failure, or the end of the group, has broken what this rank waited for."""


class Poisoned(Consequence):
    """A part that can't be used: the failure of the call that should have made it, or wrote into it, is the cause.

    That call may still be running, on a rank that is alive and well.
    """


class Unmade(Consequence):
    """A process group that another rank doesn't make: why not, that one tells, perhaps after this."""


class PutBack(Consequence):
    """What a call of colocate's own waited for was broken before it had changed anything: it begins anew after that."""


# As a worker tells them: the cause may come after them, from a rank that is alive and well.
CAUSE_MAY_COME_LATE = frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in (Poisoned, Unmade))
LET_GO = "the driver that asked for it has let go of the group"
