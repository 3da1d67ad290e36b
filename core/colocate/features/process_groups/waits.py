"""Ends waits for collectives that gloo itself doesn't end after a peer is lost.

If a connection of a gloo group is lost, most waits end, but not all. A wait for a transfer in progress (a payload
received in part, a send on the closed connection) lasts until the group's timeout of 30 minutes, because
`Pair::signalException` in gloo/transport/tcp/pair.cc notifies neither `rx_.ubuf` nor the `ubuf` of `tx_` (seen with
torch 2.13). So workers wait for collectives in short slices, and check in between whether a peer is lost. A wait for a
send or receive between two ranks can't be sliced, because gloo ends the group at a timeout.

The operation itself and its tensors remain in the group's own thread until the timeout. `destroy_later` drops backends
without waiting for such operations.
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
_hopeless: Callable[[], str | None] | None = None  # The function that was passed to `guard_waits`.
transferring: list[None] = []
"""One entry per thread that waits for a send or a receive."""


def guard_waits(hopeless: Callable[[], str | None]) -> None:
    """Make `Work.wait()` raise a `Consequence` if no peer will come any more and gloo raises no error.

    This is only for processes with collectives on gloo. Collectives of NCCL don't wait on the host, and mustn't start
    to. `hopeless` returns the reason why no peer will come any more for the calling thread's wait, or None.
    """
    global _hopeless  # This process has only one worker.
    from torch.distributed import Work

    if _hopeless is None:
        Work.wait = _guard_wait(Work.wait)  # type: ignore[method-assign]  # in this worker's own process
    _hopeless = hopeless


def _guard_wait(original: Callable[..., bool]) -> Callable[..., bool]:
    @waits_for_role_code
    def wait(work: Any, timeout: datetime.timedelta | None = None) -> bool:
        if not works.is_collective(work):
            transferring.append(None)
            try:
                return original(work) if timeout is None else original(work, timeout)
            finally:
                transferring.pop()
        # Treat a timeout of zero as no timeout, like torch.
        deadline = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        since = math.inf
        while (now := time.monotonic()) + _SLICE.total_seconds() < deadline:
            try:
                return original(work, _SLICE)
            except RuntimeError:
                completed = work.is_completed()
            if completed:
                return original(work)  # This raises the work's error, or returns if the work has just finished.
            reason = _hopeless() if _hopeless is not None else None
            if reason is None:
                since = math.inf
            elif now > (since := min(since, now)) + COLLECTIVE_PATIENCE_S:
                raise Consequence(reason)
        return original(work, max(_SLICE, datetime.timedelta(seconds=deadline - now)))

    return wait


def finish_works() -> None:
    """Wait for all operations that role code hasn't awaited yet, because these may still write to memory.

    If an operation has failed, the later `wait()` of role code raises the error.

    Raises:
        Consequence: A peer of an operation has failed.
        ValueError: An operation isn't finished in time, or only role code can wait for it.
    """
    for work in works.list_pending():
        if works.is_collective(work):
            with suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=WORKS_DONE_WITHIN_S))
        if not work.is_completed():
            raise ValueError(
                "an operation of a process group that a role has begun isn't done, and may be of what is to sleep: "
                "have the role call `wait()` of its work before"
            )


def destroy_later(backends: list[Any], within_s: float = 0.0) -> None:
    """Drop groups' backends without waiting for running operations.

    Dropping the last reference to a backend blocks until its threads have ended, which may take 30 minutes. So each
    backend is dropped on a separate thread. The caller drops the group itself, because no thread may refer to it.
    The list is empty afterwards. The call waits at most `within_s` seconds for idle backends.
    """
    threads = []
    while backends:
        grave = [backends.pop()]
        threads.append(Thread(target=grave.clear, name="colocate-bury"))
        del grave
        threads[-1].start()
    deadline = Deadline(within_s)
    for thread in threads:
        thread.join(deadline.seconds_left)
