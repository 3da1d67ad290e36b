"""Detect whether the framework's code is running on this thread. The thread must then not wait for calls.

The garbage collector runs users' `__del__` between any two lines, also of colocate: on a thread of the framework, or
while this thread holds a group's lock. A wait for a call would then block the call itself, and a new call would
overtake one that is partly sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from colocate.errors import ColocateError

DISPATCHER = "colocate-dispatcher-"
"""Prefix of the name of the thread for users' callbacks, which may wait."""


class _Here(threading.local):
    """A count, for each thread, of the sections that the thread is in. Framework threads are always in a section."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.sections = self.own = int(name.startswith("colocate-") and not name.startswith(DISPATCHER))


_here = _Here()


class Section:
    """A reentrant lock. The thread that holds the lock counts as running the framework's code.

    Attributes:
        lock: The bare lock, for the framework's own threads, which are always marked.
    """

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        _here.sections += 1  # Count before the lock is taken, because a `__del__` may run in between.
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()
        _here.sections -= 1


def in_framework() -> bool:
    """Return whether this thread belongs to the framework, or is in a `Section`."""
    return bool(_here.sections)


def begin_users() -> int:
    """Mark the start of work for a user on this thread; return the argument for `end_users`."""
    sections, _here.own = _here.own, 0
    _here.sections -= sections
    return sections


def end_users(own: int) -> None:
    _here.own += own
    _here.sections += own


@contextmanager
def waited_for() -> Iterator[None]:
    """Run a block on behalf of a waiting user's thread, so that operations that wait are allowed there."""
    sections = begin_users()
    try:
        yield
    finally:
        end_users(sections)


def refuse_to_wait(what: str) -> None:
    """Refuse an operation that waits, if the framework's own code is running on this thread.

    Args:
        what: The operation, for the error.

    Raises:
        ColocateError: The framework is at work on this thread.
    """
    if _here.sections:
        raise ColocateError(
            f"{what} would wait for an answer on a thread on which colocate is at work, which has to take that answer. "
            "The garbage collector runs a __del__ anywhere: use .submit(...) in it, or a `with` block instead of it"
        )
