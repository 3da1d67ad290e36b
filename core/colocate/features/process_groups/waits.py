"""Waits for collectives, ended when nothing else ends the wait.

A gloo group with a lost connection frees most waits, but not all: a wait for a transfer that was
under way at the moment (a payload received in part, a send that met the closed connection) is forgotten, and lasts
until the group's timeout of 30 minutes (gloo/transport/tcp/pair.cc, `Pair::signalException`: neither `rx_.ubuf` nor the
`ubuf` of `tx_` is told; seen with torch 2.13). So workers wait for collectives in short slices, and look up in between.
A send or a receive between two ranks can't be waited for in slices: gloo treats its timeout as the end of the group.

The operation itself stays behind in the group's own thread, until that timeout, with its
tensors: `destroy_later` is for backends that nobody may wait for.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from colocate._protocol.consequence import Consequence
from colocate._system.deadline import Deadline
from colocate._system.limits import COLLECTIVE_PATIENCE_S, WORKS_DONE_WITHIN_S
from colocate._system.threads import Thread
from colocate.features.process_groups import works
from colocate.worker.serving.signal_handlers import waits_for_role_code

_SLICE = datetime.timedelta(milliseconds=20)
_hopeless: Callable[[], str | None] | None = None  # of this process's worker
transferring: list[None] = []
"""One entry per thread that waits for a send or a receive."""


def guard(hopeless: Callable[[], str | None]) -> None:
    """Make `Work.wait()` raise a Consequence once a wait is hopeless and gloo hasn't raised an error.

    Only for processes with collectives on gloo: NCCL's don't wait on the host, and mustn't start to.
    `hopeless` returns the reason why no peer will come any more for the calling thread's wait.
    """
    global _hopeless  # one worker per process
    from torch.distributed import Work

    if _hopeless is None:
        Work.wait = _guarded(Work.wait)  # type: ignore[method-assign]  # in this worker's own process
    _hopeless = hopeless


def _guarded(original: Callable[..., bool]) -> Callable[..., bool]:
    @waits_for_role_code
    def wait(work: Any, timeout: datetime.timedelta | None = None) -> bool:
        if not works.is_collective(work):
            transferring.append(None)
            try:
                return original(work) if timeout is None else original(work, timeout)
            finally:
                transferring.pop()
        # Torch treats a timeout of zero as no timeout.
        deadline = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        since = math.inf
        while (now := time.monotonic()) + _SLICE.total_seconds() < deadline:
            try:
                return original(work, _SLICE)
            except RuntimeError:
                completed = work.is_completed()
            if completed:
                return original(work)  # raises the error, unless the work was done just after the slice
            reason = _hopeless() if _hopeless is not None else None
            if reason is None:
                since = math.inf
            elif now > (since := min(since, now)) + COLLECTIVE_PATIENCE_S:
                raise Consequence(reason)
        return original(work, max(_SLICE, datetime.timedelta(seconds=deadline - now)))

    return wait


def finish_works() -> None:
    """Wait for all operations that were begun and not awaited yet: such an operation may write memory.

    An error of an operation stays for the later `wait()`.

    Raises:
        Consequence: A peer of an operation has failed.
        ValueError: An operation isn't done in time, or can only be awaited by its role.
    """
    for work in works.pending():
        if works.is_collective(work):
            with suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=WORKS_DONE_WITHIN_S))
        if not work.is_completed():
            raise ValueError(
                "an operation of a process group that a role has begun isn't done, and may be of what is to sleep: "
                "have the role call `wait()` of its work before"
            )


def destroy_later(backends: list[Any], within_s: float = 0.0) -> None:
    """Drop groups' backends without a wait for running operations.

    Dropping the last reference to a backend blocks until its threads have ended, up to 30 minutes: each is dropped on a
    thread of its own. (The group itself is dropped by the caller: no thread may hold it.)
    The list is empty afterwards; the call waits at most `within_s` for idle backends.
    """
    threads = []
    while backends:
        grave = [backends.pop()]
        threads.append(Thread(target=grave.clear, name="colocate-bury"))
        del grave
        threads[-1].start()
    deadline = Deadline(within_s)
    for thread in threads:
        thread.join(deadline.left)
