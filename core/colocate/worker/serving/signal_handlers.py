"""Handlers of signals that role code has set: they run in role code, and an error is the running call's.

The lane is its process's main thread, on which Python runs handlers between any two bytecodes. Amid colocate's own code
a handler would find locks taken, and an error would break a half-finished step. So the handler is put off there: until
role code goes on, if that has called colocate, otherwise until the lane runs nothing. Between two calls no caller gets
the error: it is printed.
"""

from __future__ import annotations

import _thread
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import attrs

from colocate._role.awaited import awaited
from colocate._role.context import current
from colocate._role.method_spec import MethodSpec
from colocate._signals.guard import work_on_main
from colocate._system.lines import is_own_code
from colocate._system.tracebacks import told

if TYPE_CHECKING:
    from colocate.worker.lane import Lane

Handler: TypeAlias = Callable[[int, FrameType | None], object]
F = TypeVar("F", bound=Callable[..., Any])

NEEDS_MAIN = "signal only works in main thread of the main interpreter"  # Python's error text
_AGAIN_S = 0.001
_set, _get = signal.signal, signal.getsignal
_calls_role_code: set[CodeType] = {MethodSpec.call.__code__, awaited.__code__}
INTERRUPT = signal.SIGRTMIN + 1
"""Signal for `on_interrupt`'s function, ignored outside of role code: the sender must repeat the signal."""
put_off: list[tuple[Handler, int]] = []
"""Handlers to run later, with the signals' numbers."""
_waits_for_role_code: set[CodeType] = set()
_lane: Lane | None = None
_on_interrupt: Callable[[], object] | None = None


def calls_role_code(function: F) -> F:
    """Mark a function of colocate as a caller of role code."""
    _calls_role_code.add(function.__code__)
    return function


def waits_for_role_code(function: F) -> F:
    """Mark a function as a replacement of a library's, in which role code waits: a handler may end that wait."""
    _waits_for_role_code.add(function.__code__)
    return function


def guard(lane: Lane) -> None:
    """Restrict handlers set in this process to role code, from now on; the lane is the process's main thread."""
    global _lane
    _lane = lane
    _set(INTERRUPT, _interrupted)
    signal.signal, signal.getsignal = _signal, _getsignal
    signal.alarm, signal.setitimer = _of_the_lane(signal.alarm), _of_the_lane(signal.setitimer)
    work_on_main()


def on_interrupt(function: Callable[[], object]) -> None:
    """Register a function for `INTERRUPT`, which runs in role code, even in a wait, and may raise."""
    global _on_interrupt
    _on_interrupt = function


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _lane is not None and _on_interrupt is not None and _role_code_at(frame)[0]:
        _on_interrupt()


def leave() -> None:
    """Allow handlers to run anywhere after the lane's end, as at the end of any process."""
    global _lane
    _settle()
    _lane = None


def raise_put_off() -> None:
    """Run put-off handlers before the running call ends. Errors propagate."""
    while put_off:
        _run(*put_off.pop(0))


def _settle() -> None:
    """Run put-off handlers on the lane, between calls. An error fails the last call that awaits something."""
    while put_off:
        handler, number = put_off.pop(0)
        try:
            _run(handler, number)
        except BaseException as error:
            if _lane is None or not _lane.interrupt(error):
                name = next((candidate.name for candidate in signal.Signals if candidate == number), f"signal {number}")
                words = f"a handler that a role has set for {name} has raised between two calls, of which none fails"
                print(f"{words}:\n{told(error)}", file=sys.stderr, end="", flush=True)


@attrs.frozen
class _Guarded:
    """Wrapper of a role's handler, as set in Python."""

    handler: Handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_called, goes_on = _role_code_at(frame)
        if _lane is None or is_called:
            self.handler(number, frame)
        elif not (goes_on and _comes_again(number)):
            put_off.append((self.handler, number))
            _lane.do(_settle)


_calls_role_code.add(_Guarded.__call__.__code__)


def _comes_again(number: int) -> bool:
    """Send a signal again soon, when role code may run again; False if that isn't possible."""

    def again() -> None:
        time.sleep(_AGAIN_S)
        _thread.interrupt_main(number)  # type: ignore[arg-type]  # any signal's number

    try:
        _thread.start_new_thread(again, ())  # not by `threading`, whose locks the interrupted code may hold
    except RuntimeError:  # no thread can start
        return False
    return True


@calls_role_code
def _run(handler: Handler, number: int) -> None:
    handler(number, sys._getframe())  # some handlers look at the frame


def _signal(signalnum: Any, handler: Any) -> Any:
    # asyncio's own handler does nothing and stays bare: a repeated signal would reach the loop twice.
    guarded = callable(handler) and not str(getattr(handler, "__module__", "")).startswith("asyncio.")
    return _bare(_set(signalnum, _Guarded(handler) if guarded else handler))


def _getsignal(signalnum: Any) -> Any:
    return _bare(_get(signalnum))


def _of_the_lane(function: F) -> F:
    """Wrap a function that background roles mustn't call: the signal would interrupt other roles' calls."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (ctx := current()) is not None and ctx.role in ctx._background:
            raise ValueError(NEEDS_MAIN)
        return function(*args, **kwargs)

    return cast(F, called)


def _bare(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Guarded) else handler


def _role_code_at(frame: FrameType | None) -> tuple[bool, bool]:
    """Return whether a signal has interrupted role code or its callees, and whether role code goes on afterwards."""
    inner = None
    is_called = True  # until a frame of colocate's own lies between
    while frame is not None:
        if _is_own(frame.f_code):
            if frame.f_code in _calls_role_code and inner is not None and not _is_own(inner.f_code):
                return is_called, True
            is_called = False
        frame, inner = frame.f_back, frame
    return False, False


def is_role_code(frame: FrameType) -> bool:
    """Return whether a frame is of role code or called by role code, on any thread, and not of colocate."""
    if _is_own(frame.f_code):
        return False
    outer: FrameType | None = frame
    while outer is not None and not _is_own(outer.f_code):
        outer = outer.f_back
    return outer is None or outer.f_code in _calls_role_code


def _is_own(code: CodeType) -> bool:
    return is_own_code(code.co_filename) and code not in _waits_for_role_code
