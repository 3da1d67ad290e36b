"""Steps that no signal's handler and no other thread comes in between, though a thread takes no lock for them.

Python runs handlers, and lets other threads run, between two of its bytecodes only. Functions in C that functions in C
call, one after the other, have none in between: `map` and `compress` call them, `chain` goes from one to the next, and
`deque.extend` drives all of that. What such steps must not do is to run Python code: each function is one in C, and
none makes an object that the garbage collector tracks, as collecting runs users' `__del__`.

So the main thread, which may hold no lock (`run_deferred`), changes shared state by itself, and whoever looks at that
sees all of the steps, or none. A thread that holds a lock isn't kept waiting by these steps either: what mustn't come
amid its work looks at a gate (`Gate`), as one of the steps.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from typing import Any

_ONE_AT_A_TIME: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

run: Callable[[Iterable[object]], None] = deque[Any](maxlen=0).extend
"""Take all steps of an iterator made of functions in C."""


def when(steps: Iterable[Iterator[object]], *conditions: Iterable[object]) -> Iterator[object]:
    """Take steps, each of them if the next thing of each condition is true; none from the end of one of these on."""
    for condition in conditions:
        steps = compress(steps, condition)
    return chain.from_iterable(steps)


def called(functions: Iterable[Callable[..., object]], *arguments: Iterable[Any]) -> Iterator[object]:
    """Call functions in C, each as it is come to, with the next one of each of the arguments."""
    call: Callable[..., object] = operator.call
    return map(call, functions, *arguments)


class Gate:
    """Whether something may be begun, as steps can ask it: `passes` is a list of true things, or empty.

    It is shut while there is any reason to have it so; for good in a forked child, and in a Python whose threads run at
    the same time, where steps aren't what they are here.
    """

    def __init__(self, steps: int) -> None:
        self._reasons: set[str] = set() if _ONE_AT_A_TIME else {"threads run at once"}
        self.passes: list[bool] = [True] * steps if _ONE_AT_A_TIME else []
        self._steps = steps
        self._lock = threading.RLock()  # a `__del__` may shut it anywhere
        _gates.add(self)

    def shut(self, reason: str) -> None:
        """Have nothing begin any more, until `open`. Not on the main thread."""
        with self._lock:
            self._reasons.add(reason)
            self.passes.clear()

    def open(self, reason: str) -> None:
        """Take a reason away."""
        with self._lock:
            self._reasons.discard(reason)
            if not self._reasons and not self.passes:
                self.passes = [True] * self._steps  # another list: what was made ready before it was shut doesn't pass


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def _shut_all() -> None:
    for gate in list(_gates):
        gate._lock = threading.RLock()  # whatever state it was left in
        gate.shut("fork")


os.register_at_fork(after_in_child=_shut_all)
