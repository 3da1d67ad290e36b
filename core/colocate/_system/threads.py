"""Provide `Thread`, whose `start` raises an error if the thread can't begin."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_LOOKS_S = 0.05


class Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError if the thread can't begin.

    Without memory a new thread dies before running any Python code, and `threading.Thread.start` would wait for ever.
    This class notices the death, because the dead thread's target is freed.
    """

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started: Any = _Begins()

    @property
    def _bootstrap(self) -> Callable[[], object]:
        """Return the function that `threading` runs in the new thread, without keeping a reference to the function."""
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
            if not self._started.is_set():  # If set, the thread was started before.
                of: Any = threading
                with of._active_limbo_lock:
                    of._limbo.pop(self, None)
                if hasattr(self, "_handle"):  # Since Python 3.13 each attempt needs a new handle.
                    self._handle: Any = of._ThreadHandle()
            raise


class _Begins(threading.Event):
    """An event that is set once a thread has begun. `wait` raises RuntimeError if the thread can't begin."""

    runs: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has begun. `threading.Thread.start` calls this method."""
        while not super().wait(_LOOKS_S):
            if self.runs() is None and not self.is_set():
                raise RuntimeError("can't start new thread: no memory is left for it")
        return True
