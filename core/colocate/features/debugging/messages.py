"""Messages of stopped ranks: the last two go to workers, the others come from workers."""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class Stopped(Message):
    """Report a thread of role code that has stopped for input."""

    number: int  # the stop's number within the worker; unchanged while the user steps
    role: str | None  # None for a function
    label: str  # the running call
    rank: int  # of the role
    where: str  # file and line, or the awaited event
    error: str  # the raised error, for a stop after an error; else ""
    in_editor: bool  # whether the stop is for an editor, not for terminals; then `Printed` carries the editor's address


@message
class Printed(Message):
    """Output of a stop's debugger."""

    number: int  # of the stop
    text: str  # the output
    asks: bool  # whether the debugger waits for a line; the last line of `text` is the prompt then


@message
class WentOn(Message):
    """Report the end of a stop."""

    number: int  # of the stop


@message
class Typed(Message):
    """Send a typed line to a stop's debugger."""

    number: int  # of the stop
    line: str  # with the newline


@message
class LetGo(Message):
    """Resume a stopped rank: no terminal is attached any more."""

    number: int  # of the stop; 0 to resume all, and to prevent further stops, as the job is to end
