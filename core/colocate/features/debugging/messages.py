"""What driver and workers say of ranks that are stopped: the last two to workers, the others from them."""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class Stopped(Message):
    """A thread of role code has stopped, and waits for what somebody types."""

    number: int  # which stop of its worker it is; the same from line to line while somebody steps
    role: str | None  # the role; None of a function
    label: str  # what runs
    rank: int  # the role's
    where: str  # file and line, or what is waited for
    error: str  # what was raised, where it stops after that; else ""
    in_editor: bool  # whether it isn't for terminals of the driver; then `Printed` tells where an editor is waited for


@message
class Printed(Message):
    """A stop has something to show."""

    number: int  # the stop's
    text: str  # that
    asks: bool  # whether a line is wanted now, for which the last line is the prompt


@message
class WentOn(Message):
    """A stop is over."""

    number: int  # the stop's


@message
class Typed(Message):
    """Somebody has typed a line."""

    number: int  # the stop's
    line: str  # with its end


@message
class LetGo(Message):
    """Nobody types any more: the call goes on."""

    number: int  # the stop's; 0: all go on, and none follow, as the job is to end
