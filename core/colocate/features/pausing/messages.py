"""What driver and workers say of pauses: the first three to workers, the others from them."""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class Pause(Message):
    """Begin no further call of a background role; answered by `Pausing`, and followed by `PauseAfter` or `GoOn`."""

    token: int  # the question's number, and the pause's
    lane: str  # the role


@message
class PauseAfter(Message):
    """Begin no call of a background role after the last that any rank has begun; `Paused` follows at rest."""

    token: int  # the question's number
    lane: str  # the role
    number: int  # the pause's
    last: int  # that call
    keeps: bool  # whether calls that run may stop at their pause points


@message
class GoOn(Message):
    """A pause is over, and so are those before it."""

    lane: str  # the role
    number: int  # the pause's


@message
class Pausing(Message):
    """Tell that the worker begins no further call of a background role."""

    token: int  # the question's number
    begun: int  # the last that it has begun


@message
class Paused(Message):
    """A background role does nothing any more."""

    token: int  # the question's number
