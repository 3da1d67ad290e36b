"""Lines of users' code: which of them called, as messages have it; what is the framework's own code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

from colocate._system.off_main import frames

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTING = os.path.join(_HERE, "testing", "")  # its suites are users of colocate


def caller() -> tuple[str, int]:
    """File and line of the user's code that called into colocate."""
    for frame in frames():
        name = frame.f_code.co_filename
        if "contextlib" not in name and not is_own_code(name):
            return name, frame.f_lineno
    return "?", 0


def at(line: tuple[str, int]) -> str:
    """A line as messages have it. What a command-line option has made has no number, and the option's text."""
    where, number = line
    return f"{where}:{number}" if number else where


_made_for: ContextVar[tuple[str, int] | None] = ContextVar("made_for", default=None)


def origin() -> tuple[str, int]:
    """The line that what is made now is made for."""
    return _made_for.get() or caller()


@contextlib.contextmanager
def made_for(line: tuple[str, int] | None) -> Iterator[None]:
    """What this thread makes in the block is made for that line, of a config say, and not for the code that does so."""
    token = _made_for.set(line)
    try:
        yield
    finally:
        _made_for.reset(token)


def is_own_code(file: str) -> bool:
    """Whether a file is a part of colocate's core."""
    return file.startswith(_HERE) and not file.startswith(_TESTING)
