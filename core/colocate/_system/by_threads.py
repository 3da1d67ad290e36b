"""Something that is done for each of several things, by several threads at once."""

from __future__ import annotations

import _thread
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def by_threads(do: Callable[[_T], _R], items: Sequence[_T], most: int) -> list[_R]:
    """What it makes of each, in their order; all is over then, also when it raises, which the first error does.

    The caller's thread is one of them, and does all by itself where no memory is left for more: to start a
    `threading.Thread` waits for ever for one that then dies as it begins, and so does a pool of them.

    Args:
        do: That, which lets others run meanwhile.
        items: They.
        most: How many threads there are at most. There are no more than processors.
    """
    from concurrent.futures import Future, wait  # takes a while, and few workers need it

    made: list[Future[_R]] = [Future() for _ in items]
    left = deque(zip(made, items, strict=True))

    def work() -> None:
        while left:
            try:
                future, item = left.popleft()
            except IndexError:  # another one has just taken the last
                return
            try:
                future.set_result(do(item))
            except BaseException as error:  # the caller raises it
                future.set_exception(error)

    with contextlib.suppress(RuntimeError, MemoryError):  # none can be started
        for _ in range(min(most, len(os.sched_getaffinity(0)), len(items)) - 1):
            _thread.start_new_thread(work, ())
    work()
    wait(made)
    return [each.result() for each in made]
