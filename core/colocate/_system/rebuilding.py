"""What has come and can't be rebuilt: told as what it was, with what a class of the user's has raised as its cause."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import CodeType
from typing import Any

from colocate._system.jobs import error_text
from colocate._system.lines import is_own_code
from colocate.errors import ColocateError


class NotRebuilt(ColocateError):
    """Something that has come can't be rebuilt; `what` it is, and `why`, which a class of the user's has raised."""

    what: str = ""
    why: BaseException


@contextlib.contextmanager
def rebuilding(what: str | Callable[[], str]) -> Iterator[None]:
    """A block that unpacks something. An error of colocate's own is raised as it is.

    Raises:
        NotRebuilt: Something in it can't be rebuilt.
    """
    try:
        yield
    except ColocateError:
        raise
    except (Exception, SystemExit) as why:
        if _is_of_handler(why):
            raise
        trace = why.__traceback__
        while trace is not None and is_own_code(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        what = what if isinstance(what, str) else what()
        error = NotRebuilt(f"{what} can't be rebuilt: {error_text(why)}")
        error.what, error.why = what, why.with_traceback(trace)
        raise error from why


def _is_of_handler(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it, which can be anywhere on the main thread: it isn't the value's."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


def _code(handler: Any) -> CodeType | None:
    """What runs when a handler is called: that of a function, of a method, or of an object's `__call__`."""
    if not callable(handler):  # the default, or none
        return None
    handler = getattr(handler, "func", handler)  # of a partial
    code: CodeType | None = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code
