"""Messages about stopped ranks.

The driver sends `TerminalInput` and `DetachTerminal`, and workers send the other messages.
"""

from __future__ import annotations

from colocate._protocol.message import Message, message


@message
class SessionStarted(Message):
    """Report that role code has stopped in a debugger, and waits for input."""

    number: int  # The stop's number within the worker, which stays the same while the user steps.
    role: str | None  # The role's name, or None for a function.
    label: str  # The label of the running call.
    rank: int  # The rank within the role.
    where: str  # The file and line.
    error: str  # The error after which the rank has stopped, or an empty text.
    in_editor: bool  # Whether the stop is for an editor. If so, `TerminalOutput` has the address for the editor.


@message
class TerminalOutput(Message):
    """Report output of a stopped rank's debugger."""

    number: int  # The number of the stop.
    text: str
    asks: bool  # Whether the debugger waits for a line; the last line of `text` is then the prompt.


@message
class SessionResumed(Message):
    """Report that a stop has ended, and that the rank continues."""

    number: int  # The number of the stop.


@message
class TerminalInput(Message):
    """Send a line that the user has typed to a stopped rank's debugger."""

    number: int  # The number of the stop.
    line: str  # The line ends with a newline.


@message
class DetachTerminal(Message):
    """Resume a stopped rank, because the terminal was detached or the job is about to end."""

    number: int  # The number of the stop; 0 resumes all stops and prevents further ones, because the job ends.
