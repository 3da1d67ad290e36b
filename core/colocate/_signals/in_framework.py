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
    """How many sections this thread is in; the framework's own threads are in one for good."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.sections = self.own = int(name.startswith("colocate-") and not name.startswith(DISPATCHER))


_here = _Here()


class Section:
    """A lock for blocks of one thread at a time, which knows when it is in one; such blocks may be nested.

    Attributes:
        lock: It alone, for the framework's own threads, of which that is known anyway.
    """

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        _here.sections += 1  # first, and as the last step below: in between there may be a `__del__`
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()
        _here.sections -= 1


def in_framework() -> bool:
    """Return whether this thread is the framework's, or in a section."""
    return bool(_here.sections)


def begin_users() -> int:
    """Users' code begins on this thread, or what a user's thread waits for: what `end_users` is to be given."""
    own, _here.own = _here.own, 0
    _here.sections -= own
    return own


def end_users(own: int) -> None:
    """Note that users' code has ended."""
    _here.own += own
    _here.sections += own


@contextmanager
def waited_for() -> Iterator[None]:
    """A block in which this thread does for a user's thread, which waits for it, what that could do itself."""
    own = begin_users()
    try:
        yield
    finally:
        end_users(own)


def refuse_to_wait(what: str) -> None:
    """Refuse what would wait, where the framework is at work on this thread."""
    if _here.sections:
        raise ColocateError(
            f"{what} would wait for an answer on a thread on which colocate is at work, which has to take that answer. "
            "The garbage collector runs a __del__ anywhere: use .submit(...) in it, or a `with` block instead of it"
        )
