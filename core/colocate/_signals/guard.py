"""Defer signal handlers while the framework's own code runs on the main thread.

Python runs handlers on the main thread, between any two bytecodes. Inside the framework's code a handler would find
locks taken, and an exception from a handler would leave a change half done. So while a runtime is connected each
handler runs at once in users' code, in waits, and in users' code that the framework calls; anywhere else the handler
runs as soon as the main thread is back there. It runs after `AT_LATEST_S` seconds in any case: Ctrl-C also ends a hang
that is a bug of colocate.

Workers follow the same rule for role code: `worker/serving/signal_handlers.py`.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar

Handler: TypeAlias = Callable[[int, FrameType | None], object]
F = TypeVar("F", bound=Callable[..., Any])

_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTING = os.path.join(_CORE, "testing", "")  # The test suites there count as users' code.
AT_LATEST_S = 10.0
_AGAIN_S = 0.001
_interruptible: set[CodeType] = set()
_calls_users_code: set[CodeType] = set()
_late_signals: dict[int, float] = {}
"""Deferred signals, with the time of the first arrival (of time.monotonic())."""
_wake = _thread.allocate_lock()
_set, _get = signal.signal, signal.getsignal
_main: int | None = threading.main_thread().ident
_is_on = False
_has_thread = False
connected_runtimes: set[int] = set()
"""The ids of open runtimes."""


def is_on_main() -> bool:
    """Return whether this is the thread that runs signal handlers."""
    return _thread.get_ident() == _main


def release_main() -> None:
    """Treat the main thread like any other thread. For worker processes, where another module guards signals."""
    global _main
    _main = None


def interruptible(function: F) -> F:
    """Mark a function, such as a wait, in which signal handlers may run and raise at any point (a decorator)."""
    _interruptible.add(function.__code__)
    return function


def calls_users_code(function: F) -> F:
    """Mark a function that calls users' code (a decorator). Signal handlers may run and raise in users' code."""
    _calls_users_code.add(function.__code__)
    return function


def start_guard() -> None:
    """Guard all signal handlers of this process until `stop_guard`. Does nothing on other threads than the main one."""
    global _set, _get, _is_on, _has_thread
    if _is_on or not is_on_main():
        return
    if not _has_thread:
        _wake.acquire(blocking=False)
        _thread.start_new_thread(_send_again, ())
        _has_thread = True
    _is_on = True
    if signal.signal is not _signal:  # If another program has replaced `signal.signal`, call the replacement.
        _set, _get = signal.signal, signal.getsignal
        signal.signal, signal.getsignal = _signal, _getsignal
    for number in signal.valid_signals():
        handler = _get(number)
        if callable(handler) and _is_guardable(handler):
            _set(number, _Guarded(handler))


def stop_guard() -> None:
    """Restore the original handlers, and deliver deferred signals, unless a runtime is connected."""
    global _is_on
    if connected_runtimes or not _is_on:
        return
    _is_on = False
    if signal.signal is _signal:
        signal.signal, signal.getsignal = _set, _get
    if not is_on_main():  # Only the main thread can restore handlers; the guarded ones no longer defer signals.
        return
    for number in signal.valid_signals():
        handler = _get(number)
        if isinstance(handler, _Guarded):
            _set(number, handler.handler)
    for late in list(_late_signals):
        del _late_signals[late]
        signal.raise_signal(late)


class _Guarded:
    """The signal handler that replaces a user's handler, and calls or defers that handler."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    @calls_users_code
    def __call__(self, number: int, frame: FrameType | None) -> object:
        now = time.monotonic()
        if not _is_on or _can_run(frame) or now - _late_signals.get(number, now) > AT_LATEST_S:
            _late_signals.pop(number, None)
            return self.handler(number, frame)
        _late_signals.setdefault(number, now)
        if _wake.locked():
            _wake.release()
        return None


def _can_run(frame: FrameType | None) -> bool:
    """Return whether a signal handler may run now, given the innermost frame of the interrupted code."""
    is_called = is_ours = False
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_CORE) or code.co_filename.startswith(_TESTING):
            is_called = True
        elif code in _interruptible:
            return True
        elif code in _calls_users_code:
            return is_called and not is_ours
        else:
            is_ours = True
        frame = frame.f_back
    return not is_ours


def _send_again() -> None:
    """Send deferred signals to the main thread again, so that a wait there is interrupted. Runs on another thread."""
    while True:
        _wake.acquire()
        time.sleep(_AGAIN_S)
        for number in list(_late_signals):
            if callable(_get(number)):
                signal.pthread_kill(_main or 0, number)
            else:  # The handler was removed, so the signal might end the process.
                _late_signals.pop(number, None)


def _is_guardable(handler: Any) -> bool:
    # asyncio's handler needs no guard: the handler does nothing, and the event loop reads signals from a descriptor.
    is_asyncio = str(getattr(handler, "__module__", "")).startswith("asyncio.")
    return callable(handler) and not isinstance(handler, _Guarded) and not is_asyncio


def _signal(signalnum: Any, handler: Any) -> Any:
    return _unwrap_handler(_set(signalnum, _Guarded(handler) if _is_guardable(handler) else handler))


def _getsignal(signalnum: Any) -> Any:
    return _unwrap_handler(_get(signalnum))


def _unwrap_handler(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Guarded) else handler


def _reset_after_fork() -> None:
    global _main, _is_on, _has_thread
    _main = threading.main_thread().ident
    _is_on = _has_thread = False
    connected_runtimes.clear()
    _late_signals.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
