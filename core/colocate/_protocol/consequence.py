"""Errors that only follow from another failure: callers get the cause instead."""

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
"""Errors that colocate raises for the caller: these reach the caller unchanged, unless role code has raised them."""


class Consequence(ColocateError):
    """A failure of another rank, or the end of the group, has broken this rank's wait."""


class Poisoned(Consequence):
    """An unusable part of a resident: the call that should have made the part, or wrote into it, has failed.

    That call may still be running, on a rank that is alive and well.
    """


class Unmade(Consequence):
    """A process group that another rank doesn't create. That rank reports the reason, perhaps later."""


class PutBack(Consequence):
    """An internal call that was interrupted before any change; the call is sent again."""


# Workers report these types by name: the cause may arrive later, from a rank that is alive and well.
CAUSE_MAY_COME_LATE = frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in (Poisoned, Unmade))
LET_GO = "the driver that asked for it has let go of the group"
