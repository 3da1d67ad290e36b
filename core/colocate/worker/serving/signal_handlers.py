"""Handlers of signals that role code has set: they run in role code, and what one raises is the error of that call.

The lane is its process's main thread, on which Python runs handlers between any two bytecodes. Amid colocate's own code
a handler would find locks taken, and what it raises would tear what is half done. So there it is put off: until role
code goes on, where that has called colocate, otherwise until the lane has nothing under way. Between two calls nobody
waits for what it raises: that is printed.
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

NEEDS_MAIN = "signal only works in main thread of the main interpreter"  # Python's words
_AGAIN_S = 0.001
_set, _get = signal.signal, signal.getsignal
_calls_role_code: set[CodeType] = {MethodSpec.call.__code__, awaited.__code__}
INTERRUPT = signal.SIGRTMIN + 1
"""Has `on_interrupt`'s function called if it comes in role code, and is nothing elsewhere: it is to be sent again."""
put_off: list[tuple[Handler, int]] = []
"""What is to be run later, with the numbers of the signals."""
_waits_for_role_code: set[CodeType] = set()
_lane: Lane | None = None
_on_interrupt: Callable[[], object] | None = None


def calls_role_code(function: F) -> F:
    """Declare of a function of colocate's that it calls role code."""
    _calls_role_code.add(function.__code__)
    return function


def waits_for_role_code(function: F) -> F:
    """Declare that it stands for a library's own, in which role code waits: a handler may end that wait."""
    _waits_for_role_code.add(function.__code__)
    return function


def guard(lane: Lane) -> None:
    """From now on handlers that are set in this process run in role code only; the lane is its main thread."""
    global _lane
    _lane = lane
    _set(INTERRUPT, _interrupted)
    signal.signal, signal.getsignal = _signal, _getsignal
    signal.alarm, signal.setitimer = _of_the_lane(signal.alarm), _of_the_lane(signal.setitimer)
    work_on_main()


def on_interrupt(function: Callable[[], object]) -> None:
    """Have a function called in role code, wherever that is or waits, when `INTERRUPT` comes: it may raise."""
    global _on_interrupt
    _on_interrupt = function


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _lane is not None and _on_interrupt is not None and _role_code_at(frame)[0]:
        _on_interrupt()


def leave() -> None:
    """The lane has ended: handlers run wherever they come, as at the end of any process."""
    global _lane
    _settle()
    _lane = None


def raise_put_off() -> None:
    """Run what was put off amid a call, before that is over. What it raises comes through."""
    while put_off:
        _run(*put_off.pop(0))


def _settle() -> None:
    """On the lane, while no code of a call runs: run what was put off. A call that awaits something fails of it."""
    while put_off:
        handler, number = put_off.pop(0)
        try:
            _run(handler, number)
        except BaseException as error:
            if _lane is None or not _lane.interrupt(error):
                name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
                words = f"a handler that a role has set for {name} has raised between two calls, of which none fails"
                print(f"{words}:\n{told(error)}", file=sys.stderr, end="", flush=True)


@attrs.frozen
class _Guarded:
    """A handler as Python has it."""

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
    """Have a signal come again, when colocate's own code has perhaps returned to role code; False if that can't be."""

    def again() -> None:
        time.sleep(_AGAIN_S)
        _thread.interrupt_main(number)  # type: ignore[arg-type]  # any signal's number

    try:
        _thread.start_new_thread(again, ())  # not by `threading`, whose locks may be taken by what was interrupted
    except RuntimeError:  # no thread is to be had
        return False
    return True


@calls_role_code
def _run(handler: Handler, number: int) -> None:
    handler(number, sys._getframe())  # some look at the frame


def _signal(signalnum: Any, handler: Any) -> Any:
    """See `signal.signal`."""
    # asyncio's own does nothing, and is called once only: a loop is told of each call.
    guarded = callable(handler) and not str(getattr(handler, "__module__", "")).startswith("asyncio.")
    return _bare(_set(signalnum, _Guarded(handler) if guarded else handler))


def _getsignal(signalnum: Any) -> Any:
    """See `signal.getsignal`."""
    return _bare(_get(signalnum))


def _of_the_lane(function: F) -> F:
    """Return a function that a background role can't call: what comes of that would come in the other roles' calls."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (ctx := current()) is not None and ctx.role in ctx._background:
            raise ValueError(NEEDS_MAIN)
        return function(*args, **kwargs)

    return cast(F, called)


def _bare(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Guarded) else handler


def _role_code_at(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether a signal has interrupted role code, or what that has called; and whether role code goes on afterwards."""
    inner = None
    is_called = True  # while no code of colocate's own is between
    while frame is not None:
        if _is_own(frame.f_code):
            if frame.f_code in _calls_role_code and inner is not None and not _is_own(inner.f_code):
                return is_called, True
            is_called = False
        frame, inner = frame.f_back, frame
    return False, False


def is_role_code(frame: FrameType) -> bool:
    """Return whether a frame is of role code, or of what that has called, on whatever thread, but of none of ours."""
    if _is_own(frame.f_code):
        return False
    outer: FrameType | None = frame
    while outer is not None and not _is_own(outer.f_code):
        outer = outer.f_back
    return outer is None or outer.f_code in _calls_role_code


def _is_own(code: CodeType) -> bool:
    return is_own_code(code.co_filename) and code not in _waits_for_role_code
