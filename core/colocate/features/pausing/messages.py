"""Messages of pauses: the first three go to workers, the others come from workers."""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class Pause(Message):
    """Ask a worker to begin no further call of a background role."""

    token: int  # the request's number, which also numbers the pause
    lane: str  # the role


@message
class PauseAfter(Message):
    """Set the last call that a paused background role begins; `Paused` follows at rest."""

    token: int  # the request's number
    lane: str  # the role
    number: int  # of the pause
    last: int  # the number of the last call
    keeps: bool  # whether running calls may stop at their pause points


@message
class GoOn(Message):
    """Resume a background role: this pause is over, and all earlier ones."""

    lane: str  # the role
    number: int  # of the pause


@message
class Pausing(Message):
    """The answer to `Pause`: the worker begins no further call of the role."""

    token: int  # the request's number
    begun: int  # the number of the last call that began


@message
class Paused(Message):
    """The answer to `PauseAfter`: the role is at rest."""

    token: int  # the request's number
