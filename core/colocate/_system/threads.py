"""Start threads that begin, or raise (`Thread`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_LOOKS_S = 0.05


class Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError if the thread can't begin.

    A new thread without memory dies before running any Python code, and `threading.Thread.start` would wait for ever.
    The death frees the thread's target, which is noticed here.
    """

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started: Any = _Begins()

    @property
    def _bootstrap(self) -> Callable[[], object]:
        """Return the target of the thread, without keeping a reference. For `threading`."""
        whole: Any = threading.Thread
        runs = partial(whole._bootstrap, self)
        self._started.runs = weakref.ref(runs)
        return runs

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: No thread can be started at present. A later attempt may succeed.
        """
        try:
            super().start()
        except RuntimeError:
            if not self._started.is_set():  # otherwise the thread was started before
                of: Any = threading
                with of._active_limbo_lock:
                    of._limbo.pop(self, None)
                if hasattr(self, "_handle"):  # one handle per attempt, since Python 3.13
                    self._handle: Any = of._ThreadHandle()
            raise


class _Begins(threading.Event):
    """Set when a thread has begun. `wait` raises if the thread never will."""

    runs: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has begun. For `threading`."""
        while not super().wait(_LOOKS_S):
            if self.runs() is None and not self.is_set():
                raise RuntimeError("can't start new thread: no memory is left for it")
        return True
