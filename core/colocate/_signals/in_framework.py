"""Detect whether the framework's own code is running on this thread: such code must not wait for calls.

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


class _ThreadState(threading.local):
    """A count per thread of the `Section`s that the thread is in. Framework threads always count as in one."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.sections = self.base_sections = int(name.startswith("colocate-") and not name.startswith(DISPATCHER))


_here = _ThreadState()


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


def is_in_framework() -> bool:
    """Return whether this thread belongs to the framework, or is in a `Section`."""
    return bool(_here.sections)


def begin_users_code() -> int:
    """Mark this thread as running users' code; return the argument for `end_users_code`."""
    sections, _here.base_sections = _here.base_sections, 0
    _here.sections -= sections
    return sections


def end_users_code(own: int) -> None:
    _here.base_sections += own
    _here.sections += own


@contextmanager
def act_for_user() -> Iterator[None]:
    """Run a block on behalf of a waiting user's thread, so that operations that wait are allowed there."""
    sections = begin_users_code()
    try:
        yield
    finally:
        end_users_code(sections)


def check_may_wait(what: str) -> None:
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
