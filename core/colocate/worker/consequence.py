"""Errors that only follow from something else: what their caller is told is that, not these."""

from __future__ import annotations

from colocate.errors import ColocateError


class Consequence(ColocateError):
    """Another rank's failure, or the end of the group, has broken what this rank waited for."""


class Poisoned(Consequence):
    """A part that was never made: the failure of the call that should have made it is the cause."""
