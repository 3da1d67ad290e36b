"""Errors that only follow from another failure, so that callers get the cause instead."""

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
"""Errors of colocate that reach the caller unchanged, unless role code has raised the error."""


class Consequence(ColocateError):
    """Raised if a failure of another rank, or the end of the group, has interrupted this rank's wait."""


class PoisonedPart(Consequence):
    """Raised if a part of a resident is unusable, because the call that made or changed the part has failed.

    That call may still be running on another rank.
    """


class GroupNotCreated(Consequence):
    """Raised if another rank doesn't create a process group. That rank reports the reason, perhaps later."""


class RetryCall(Consequence):
    """Raised if an internal call was interrupted before any change. The call is sent again."""


# After these errors the cause may arrive late, from a rank that still runs. Workers report types by name.
CAUSE_MAY_COME_LATE = frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in (PoisonedPart, GroupNotCreated))
LET_GO = "the driver that asked for it has let go of the group"
