"""Whether the framework is at work on this thread, which mustn't wait then, nor begin something else.

The garbage collector runs users' `__del__` between any two lines, also of ours: on a thread of the framework, or while
this one holds the lock of a group. What waited there for a call would wait for itself, and a call that was sent there
would overtake one of which a part has been sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from colocate.errors import ColocateError

DISPATCHER = "colocate-dispatcher-"
"""Begins the name of the thread on which users' callbacks run, which may wait."""


class _Here(threading.local):
    sections = 0
    waited_for = False


_here = _Here()


class Section:
    """A lock for blocks of one thread at a time, which knows when it is in one; such blocks may be nested."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        _here.sections += 1  # first, and as the last step below: in between there may be a `__del__`
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        _here.sections -= 1


def at_work() -> bool:
    """Whether this thread is the framework's, or in a section."""
    if _here.sections:
        return True
    name = threading.current_thread().name
    return name.startswith("colocate-") and not name.startswith(DISPATCHER) and not _here.waited_for


@contextmanager
def waited_for() -> Iterator[None]:
    """A block in which this thread does for a user's thread, which waits for it, what that could do itself."""
    _here.waited_for = True
    try:
        yield
    finally:
        _here.waited_for = False


def refuse_to_wait(what: str) -> None:
    """Refuse what would wait, where the framework is at work on this thread."""
    if at_work():
        raise ColocateError(
            f"{what} would wait for an answer on a thread on which colocate is at work, which has to take that answer. "
            "The garbage collector runs a __del__ anywhere: use .submit(...) in it, or a `with` block instead of it"
        )
