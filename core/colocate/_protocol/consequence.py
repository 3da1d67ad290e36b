"""Errors that only follow from something else: what their caller is told is that, not these."""

from __future__ import annotations

from colocate.errors import ColocateError


class Consequence(ColocateError):
    """Another rank's failure, or the end of the group, has broken what this rank waited for."""


class Poisoned(Consequence):
    """A part that can't be used: the failure of the call that should have made it, or wrote into it, is the cause.

    That call may still be running, on a rank that is alive and well.
    """


class PutBack(Consequence):
    """What a call of colocate's own waited for was broken before it had changed anything: it begins anew after that."""


POISONED = f"{Poisoned.__module__}.{Poisoned.__qualname__}"  # as a worker tells it
LET_GO = "the driver that asked for it has let go of the group"
