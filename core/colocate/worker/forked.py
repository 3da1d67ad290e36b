"""A fork that role code has made, and that ends in role code: as that of a script does, and not as the worker."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from colocate._signals.at_work import begin_users, end_users
from colocate.wire import track
from colocate.worker.ending import end


class RoleCode:
    """A block of role code, which a forked child doesn't leave: it ends there, by the code that a script would have."""

    def __init__(self, has_thread: bool = True) -> None:
        """Args: has_thread: Whether nothing else comes on the lane until it ends, as while it awaits something."""
        self._is_left = True
        self._has_thread = has_thread
        self._begun: list[int] = []
        track(self)

    def forget(self) -> None:
        """In a forked child."""
        self._is_left = False

    def __enter__(self) -> None:
        if self._has_thread:
            self._begun.append(begin_users())

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._has_thread:
            end_users(self._begun.pop())
        if not self._is_left:
            end(_status(error))


def _status(error: BaseException | None) -> int:
    """The exit code of a script that such an exception ends, which is told as there."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0)
    print(error.code, file=sys.stderr)
    return 1
