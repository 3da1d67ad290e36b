"""`Thread`: a thread of the framework, which begins, or isn't there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_LOOKS_S = 0.05


class Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError wherever it can't begin.

    One that finds no memory as it begins dies before it runs any code of Python's, and `threading.Thread.start` waits
    for it for ever. What a thread is to run goes with it: that is seen here.
    """

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started: Any = _Begins()

    @property
    def _bootstrap(self) -> Callable[[], object]:
        """Return what the thread runs, and nobody else holds. For `threading`."""
        whole: Any = threading.Thread
        runs = partial(whole._bootstrap, self)
        self._started.runs = weakref.ref(runs)
        return runs

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: No thread can be started, for now. It can be tried again.
        """
        try:
            super().start()
        except RuntimeError:
            if not self._started.is_set():  # else it was started before
                of: Any = threading
                with of._active_limbo_lock:
                    of._limbo.pop(self, None)
                if hasattr(self, "_handle"):  # since Python 3.13, for one attempt
                    self._handle: Any = of._ThreadHandle()
            raise


class _Begins(threading.Event):
    """Set when a thread has begun. Who waits hears when it never will."""

    runs: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for as long as that can be. For `threading`."""
        while not super().wait(_LOOKS_S):
            if self.runs() is None and not self.is_set():
                raise RuntimeError("can't start new thread: no memory is left for it")
        return True
