"""Closing in a signal's handler, which may have interrupted colocate itself at any point, with its locks held."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from colocate._owned import Owned

F = TypeVar("F", bound="Callable[..., Any]")
# How much longer than the grace period the handler waits for what it can't know to wait for itself.
_MORE_S = 5.0


_calling_out: set[CodeType] = set()


def calls_out(function: F) -> F:
    """Of a function that runs the user's code on the caller's thread: who is called by it hasn't interrupted it."""
    _calling_out.add(cast("FunctionType", function).__code__)
    return function


def close_now(node: Owned, by: str, grace: float, force: bool) -> None:
    """Close a node on behalf of the caller's line.

    In a handler that has interrupted colocate another thread does it, for what was interrupted may hold what closing
    needs. The handler waits for that, unless this is known to be so: the closing goes on then when it has returned.
    """
    if not _has_interrupted_colocate():
        node.close_for(by, grace, force)
        return
    patience = 0.0 if any(each.in_hand for each in _below(node)) else grace + _MORE_S
    errors: list[BaseException] = []
    left = False

    def close() -> None:
        try:
            node.close_for(by, grace, force)
        except BaseException as error:
            if left:  # nobody waits for it any more
                sys.excepthook(type(error), error, error.__traceback__)
            else:
                errors.append(error)

    closer = threading.Thread(target=close, name="colocate-close", daemon=True)
    closer.start()
    closer.join(patience)
    left = closer.is_alive()
    if errors:
        raise errors[0]


def _has_interrupted_colocate() -> bool:
    """Whether below the caller's own code colocate is at work on this, the main thread."""
    from colocate._owned import is_own_code

    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1)
    theirs = False
    while frame is not None:
        name = frame.f_code.co_filename
        if theirs and frame.f_code in _calling_out:
            return False
        if is_own_code(name):
            if theirs:
                return True
        elif "contextlib" not in name:
            theirs = True
        frame = frame.f_back
    return False


def _below(node: Owned) -> Iterator[Owned]:
    yield node
    for child in list(node.children.values()):
        yield from _below(child)
