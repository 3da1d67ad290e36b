"""Format tracebacks for users, with a count in place of each run of the framework's frames."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import operator
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import Any

from colocate._system.jobs import format_error
from colocate._system.lines import is_own_code, replace_cells
from colocate.errors import ColocateError, RoleError, RoleStartError

_executors: set[str] = set()  # These are the code folders of the executors in use.
_BETWEEN = (  # Frames of this code may be between users' frames and the framework's.
    "<frozen ",  # This prefix marks the interpreter's own code.
    *(f"{os.sep}{name}" for name in ("contextlib.py", "functools.py", "threading.py", f"bin{os.sep}colocate")),
    *(f"{os.sep}{name}{os.sep}" for name in ("typer", "cloudpickle")),
)


_CARRIED: Any = object()


def add_folded_packages(packages: Iterable[str]) -> None:
    """Treat frames of an executor's packages or modules as the framework's own frames."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            folders = [f"{folder}{os.sep}" for folder in spec.submodule_search_locations or ()]
            _executors.update(folders or filter(None, [spec.origin]))


def format_exception(error: BaseException, trace: TracebackType | None = _CARRIED, *, whole: bool = True) -> str:
    """Format an exception and all causes as Python does, but with a count in place of each run of framework frames.

    An exception with framework frames only is formatted in full, because the fault is then the framework's. This
    doesn't apply to errors that report a role's exception, and to groups that contain a user's error.

    Args:
        error: The exception.
        trace: A traceback to use instead of the exception's own.
        whole: Whether to count framework frames before the first user frame, too.
    """
    trace = error.__traceback__ if trace is _CARRIED else trace
    try:
        formatted = traceback.TracebackException(type(error), error, trace)
        _fold_exception(formatted, error, whole)
        return "".join(formatted.format())
    except Exception as fault:  # The exception's class may be faulty, or its nested exceptions endless.
        frames = "".join(fold_stack(traceback.extract_tb(trace), whole).format())
        head = f"Traceback (most recent call last):\n{frames}" if frames else ""
        return f"{head}{format_error(error)}\n(what belongs to it can't be told: {format_error(fault)})\n"


def fold_uncaught() -> None:
    """Format uncaught errors of scripts and IPython cells by `format_exception`, unless another hook is set."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if running is None else running()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _show_cell_error)


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = format_exception(error, trace)
    if _FOLDED.search(text):
        sys.stderr.write(text)
    else:
        sys.__excepthook__(kind, error, trace)


def _show_cell_error(
    shell: Any, kind: type[BaseException], error: Any, trace: TracebackType, tb_offset: int | None = None
) -> None:
    text = replace_cells(format_exception(error, trace.tb_next))  # The first frame is IPython's own.
    if _FOLDED.search(text):
        with contextlib.suppress(AttributeError):  # An exception class with `__slots__` refuses the attribute.
            error._render_traceback_ = text.rstrip().splitlines  # IPython reads this attribute.
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


_FOLDED = re.compile(r"^  \.\.\. \d+ frames? of colocate$", re.MULTILINE)


def format_user_frames(error: BaseException) -> str:
    """Return the text of an exception's frames, with framework frames as counts; empty if there are no other frames."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = fold_stack(frames, whole=True)
    return "".join(shown.format()) if shown is not frames else ""


def drop_own_traceback(error: BaseException) -> BaseException:
    """Remove an exception's traceback if all frames are the framework's; return the exception."""
    return error if format_user_frames(error) else error.with_traceback(None)


def fold_stack(frames: traceback.StackSummary, whole: bool, in_full: bool = True) -> traceback.StackSummary:
    """Replace each run of framework frames in a stack by a count. `in_full` keeps a stack of only framework frames."""
    ours = [is_own_code(summary.filename) or summary.filename.startswith(tuple(_executors)) for summary in frames]
    between = [any(part in summary.filename for part in _BETWEEN) for summary in frames]
    users = [not (a or b) for a, b in zip(ours, between, strict=True)]
    if in_full and not any(users):
        return frames
    result = _Folded()
    for is_users, group in itertools.groupby(zip(users, ours, frames, strict=True), key=operator.itemgetter(0)):
        run = list(group)
        if is_users or not any(is_ours for _, is_ours, _ in run):
            result.extend(frame for _, _, frame in run)
        elif whole or result:
            result.append(_Fold(len(run)))
    return result


def _fold_exception(found: traceback.TracebackException, error: BaseException, whole: bool) -> None:
    todo = [(found, error)]
    while todo:  # A loop, because a chain of causes may exceed the recursion limit.
        found, error = todo.pop()
        if _is_role_error(error):  # The message of a role's error already says what failed and where.
            found.__cause__ = found.__context__ = None
        found.stack = fold_stack(found.stack, whole, in_full=not _names_fault(error))
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        chained = (found.__cause__, error.__cause__), (found.__context__, error.__context__)
        for part, cause in (*chained, *zip(found.exceptions or (), parts, strict=False)):
            if part is not None and cause is not None:
                todo.append((part, cause))


def _is_role_error(error: BaseException) -> bool:
    return isinstance(error, RoleError | RoleStartError) and bool(error.remote_traceback)


def _names_fault(error: BaseException) -> bool:
    """Return whether an error points to users' code by other means than the error's own stack."""
    if isinstance(error, BaseExceptionGroup):
        return any(_names_fault(part) or format_user_frames(part) for part in error.exceptions)
    return _is_role_error(error)


class _Fold(traceback.FrameSummary):
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        super().__init__("colocate", count, "", lookup_line=False)
        self.count = count


class _Folded(traceback.StackSummary):
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        if isinstance(frame_summary, _Fold):
            return f"  ... {frame_summary.count} frame{'s' if frame_summary.count > 1 else ''} of colocate\n"
        return super().format_frame_summary(frame_summary, **options)


class NotRebuilt(ColocateError):
    """Raised if received data can't be rebuilt.

    `subject` names the data, and `cause` is the error of a user's class.
    """

    subject: str = ""
    cause: BaseException


class rebuilding:
    """A context manager for unpacking data that turns errors into `NotRebuilt`. Errors of colocate pass unchanged."""

    def __init__(self, what: str | Callable[[], str]) -> None:
        self._subject = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, why: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(why, (Exception, SystemExit)) or isinstance(why, ColocateError) or is_of_handler(why):
            return
        while trace is not None and is_own_code(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        subject = self._subject if isinstance(self._subject, str) else self._subject()
        error = NotRebuilt(f"{subject} can't be rebuilt: {format_error(why)}")
        error.subject, error.cause = subject, why.with_traceback(trace)
        raise error from why


def is_of_handler(error: BaseException) -> bool:
    """Return whether an error was raised by a signal handler on the main thread, and not by the unpacked data."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers: set[CodeType | None] = set()
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)):  # The default action and an ignored signal aren't callable.
            handler = getattr(handler, "func", handler)  # A `functools.partial` has the handler as `func`.
            code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            handlers.add(code)  # The code belongs to a function, a method or an object's `__call__`.
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))
