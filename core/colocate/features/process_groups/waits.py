"""Waits for a collective that end when nothing else ends them.

A gloo group of which a connection is gone frees who waits in it, but not everybody: who waits for a transfer that was
under way just then (a payload of which a part had come, a send that met the closed connection) is forgotten, and waits
for the group's timeout of 30 minutes (gloo/transport/tcp/pair.cc, `Pair::signalException`: neither `rx_.ubuf` nor the
`ubuf` of `tx_` is told; seen with torch 2.13). So workers wait for collectives in short slices, and look up in between.
A send or a receive between two ranks can't be waited for in slices: for gloo the end of one is the end of its group.

The operation itself stays behind in the group's own thread, until that timeout, and with it the tensors that it was
given: `destroy_later` is for what mustn't be waited for.
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
"""One for each thread that waits for a send or a receive."""


def guard(hopeless: Callable[[], str | None]) -> None:
    """From now on `Work.wait()` raises a Consequence once a wait is hopeless and gloo has not ended it by itself.

    Only for a process whose collectives run on gloo: those of NCCL don't wait on the host, and mustn't begin to.
    `hopeless` says why nobody will come any more for what the calling thread waits for.
    """
    global _hopeless  # the worker's; its process has one
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
        # To torch, no time at all means for ever.
        deadline = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        since = math.inf
        while (now := time.monotonic()) + _SLICE.total_seconds() < deadline:
            try:
                return original(work, _SLICE)
            except RuntimeError:
                completed = work.is_completed()
            if completed:
                return original(work)  # raises what has gone wrong, unless it was done just after the slice
            reason = _hopeless() if _hopeless is not None else None
            if reason is None:
                since = math.inf
            elif now > (since := min(since, now)) + COLLECTIVE_PATIENCE_S:
                raise Consequence(reason)
        return original(work, max(_SLICE, datetime.timedelta(seconds=deadline - now)))

    return wait


def finish_works() -> None:
    """Wait until all operations are done that were begun and that somebody is to wait for later: they write memory.

    What goes wrong in one is told to whoever waits for it then.

    Raises:
        Consequence: A peer of one has failed.
        ValueError: One isn't done in time, or can only be waited for by whoever has begun it.
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
    """Let go of groups' backends, without waiting for what still runs in them.

    The last reference to one goes when its threads have ended, which may be in 30 minutes: so it goes on a thread of
    its own. (The group itself goes where it was: nobody may hold that.)
    The list is empty afterwards; those in which nothing runs are waited for so long.
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
