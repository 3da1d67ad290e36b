"""Runs the signal handlers of role code only inside role code, so that their errors belong to a call.

The lane is its process's main thread, on which Python may run a handler between any two bytecodes. Amid colocate's own
code, a handler could find locks taken, and an error could break a half-finished step. So the handler is put off: until
role code continues, if role code has called colocate; otherwise until the lane runs nothing. Between two calls no
caller can get the handler's error, so it is printed.
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

from colocate._role.awaited import run_coroutine
from colocate._role.context import current
from colocate._role.method_spec import MethodSpec
from colocate._signals.guard import release_main
from colocate._system.lines import is_own_code
from colocate._system.tracebacks import format_exception

if TYPE_CHECKING:
    from colocate.worker.lane import Lane

Handler: TypeAlias = Callable[[int, FrameType | None], object]
F = TypeVar("F", bound=Callable[..., Any])

NEEDS_MAIN = "signal only works in main thread of the main interpreter"  # This is Python's own error text.
_AGAIN_S = 0.001
_set, _get = signal.signal, signal.getsignal
_calls_role_code: set[CodeType] = {MethodSpec.call.__code__, run_coroutine.__code__}
INTERRUPT = signal.SIGRTMIN + 1
"""Signal for `set_interrupt_callback`'s function, ignored outside of role code: the sender must repeat the signal."""
deferred_handlers: list[tuple[Handler, int]] = []
"""Handlers to run later, with the signals' numbers."""
_waits_for_role_code: set[CodeType] = set()
_lane: Lane | None = None
_on_interrupt: Callable[[], object] | None = None


def calls_role_code(function: F) -> F:
    """Mark a function of colocate as a caller of role code."""
    _calls_role_code.add(function.__code__)
    return function


def waits_for_role_code(function: F) -> F:
    """Mark a colocate function that replaces a library's waiting function.

    A handler may interrupt this wait of role code.
    """
    _waits_for_role_code.add(function.__code__)
    return function


def guard_handlers(lane: Lane) -> None:
    """Run signal handlers of this process only in role code from now on. The lane must be the main thread."""
    global _lane
    _lane = lane
    _set(INTERRUPT, _on_interrupt_signal)
    signal.signal, signal.getsignal = _signal, _getsignal
    signal.alarm, signal.setitimer = _limit_to_main_lane(signal.alarm), _limit_to_main_lane(signal.setitimer)
    release_main()


def set_interrupt_callback(function: Callable[[], object]) -> None:
    """Register the function for the signal `INTERRUPT`: it runs in role code, even during a wait, and may raise."""
    global _on_interrupt
    _on_interrupt = function


def _on_interrupt_signal(number: int, frame: FrameType | None) -> None:
    if _lane is not None and _on_interrupt is not None and _find_role_code(frame)[0]:
        _on_interrupt()


def end_guard() -> None:
    """Allow handlers to run anywhere again, because the lane has ended."""
    global _lane
    _run_deferred()
    _lane = None


def run_deferred_handlers() -> None:
    """Run the deferred handlers before the running call ends, so that their errors fail the call."""
    while deferred_handlers:
        _run_handler(*deferred_handlers.pop(0))


def _run_deferred() -> None:
    """Run the deferred handlers on the lane between calls. An error fails the last call that awaits something."""
    while deferred_handlers:
        handler, number = deferred_handlers.pop(0)
        try:
            _run_handler(handler, number)
        except BaseException as error:
            if _lane is None or not _lane.interrupt_last(error):
                name = next((candidate.name for candidate in signal.Signals if candidate == number), f"signal {number}")
                words = f"a handler that a role has set for {name} has raised between two calls, of which none fails"
                print(f"{words}:\n{format_exception(error)}", file=sys.stderr, end="", flush=True)


@attrs.frozen
class _Guarded:
    """Wrapper around a role's signal handler, which defers the handler outside of role code."""

    handler: Handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_called, goes_on = _find_role_code(frame)
        if _lane is None or is_called:
            self.handler(number, frame)
        elif not (goes_on and _resend_signal(number)):
            deferred_handlers.append((self.handler, number))
            _lane.run_action(_run_deferred)


_calls_role_code.add(_Guarded.__call__.__code__)


def _resend_signal(number: int) -> bool:
    """Send the signal again soon, when role code may run. Return False if no thread can start."""

    def again() -> None:
        time.sleep(_AGAIN_S)
        _thread.interrupt_main(number)  # type: ignore[arg-type]  # any signal's number

    try:
        # The module `threading` isn't used, because the interrupted code may hold locks of that module.
        _thread.start_new_thread(again, ())
    except RuntimeError:  # No thread can start.
        return False
    return True


@calls_role_code
def _run_handler(handler: Handler, number: int) -> None:
    handler(number, sys._getframe())  # Some handlers inspect the frame.


def _signal(signalnum: Any, handler: Any) -> Any:
    # asyncio's own handler does nothing and isn't wrapped, because a repeated signal would reach the loop twice.
    guarded = callable(handler) and not str(getattr(handler, "__module__", "")).startswith("asyncio.")
    return _unwrap_handler(_set(signalnum, _Guarded(handler) if guarded else handler))


def _getsignal(signalnum: Any) -> Any:
    return _unwrap_handler(_get(signalnum))


def _limit_to_main_lane(function: F) -> F:
    """Wrap a function that background roles mustn't call, because the signal would interrupt other roles' calls."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (ctx := current()) is not None and ctx.role in ctx._background:
            raise ValueError(NEEDS_MAIN)
        return function(*args, **kwargs)

    return cast(F, called)


def _unwrap_handler(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Guarded) else handler


def _find_role_code(frame: FrameType | None) -> tuple[bool, bool]:
    """Return whether a signal has interrupted role code or its callees, and whether role code continues afterwards."""
    inner = None
    is_called = True  # Set to False when one of colocate's own frames is in between.
    while frame is not None:
        if _is_own(frame.f_code):
            if frame.f_code in _calls_role_code and inner is not None and not _is_own(inner.f_code):
                return is_called, True
            is_called = False
        frame, inner = frame.f_back, frame
    return False, False


def is_role_code(frame: FrameType) -> bool:
    """Return whether a frame belongs to role code or to code that role code has called, and not to colocate."""
    if _is_own(frame.f_code):
        return False
    outer: FrameType | None = frame
    while outer is not None and not _is_own(outer.f_code):
        outer = outer.f_back
    return outer is None or outer.f_code in _calls_role_code


def _is_own(code: CodeType) -> bool:
    return is_own_code(code.co_filename) and code not in _waits_for_role_code
