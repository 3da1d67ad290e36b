"""Defines the messages about pauses. The first three go to workers, and the last two come from workers."""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class Pause(Message):
    """Ask a worker to begin no further call of a background role."""

    token: int  # The request's number, which is also the pause's number.
    lane: str  # the role


@message
class PauseAfter(Message):
    """Set the last call that a paused background role begins.

    The worker answers `RoleAtRest` when the role is at rest.
    """

    token: int  # The request's number.
    lane: str  # the role
    number: int  # The pause's number.
    last: int  # The number of the last call that may begin.
    keeps: bool  # Whether running calls may stop at their pause points.


@message
class ResumeRole(Message):
    """Resume a background role, and end this pause and all earlier pauses."""

    lane: str  # the role
    number: int  # The pause's number.


@message
class PauseBegun(Message):
    """The answer to `Pause`: the worker begins no further call of the role."""

    token: int  # The request's number.
    begun: int  # The number of the last call that began.


@message
class RoleAtRest(Message):
    """The answer to `PauseAfter`: the role is at rest."""

    token: int  # The request's number.
