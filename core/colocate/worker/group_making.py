"""Process groups that are being made, and the lane where it waits for one.

A lane that is called back leaves, but its rank isn't back before what it has left is there, on all ranks, or is known
never to be (`torch_meetings`): who comes next finds nothing half made, and nothing that will be there later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message

Make: TypeAlias = Callable[[], object]


class Worker(Protocol):
    """What groups need of the worker that they are of."""

    def ask(self, question: Message, apart: bool = False) -> Any:
        """Ask the driver."""

    def asking(self) -> int | None:
        """The number of the call that asks; None for none."""
        ...

    def why_not(self) -> str | None:
        """Why the call that asks mustn't wait for its peers; None when it may."""
        ...


class Making:
    """What is made by threads of its own, as torch waits for all ranks: the lane waits here, and can leave.

    Attributes:
        has_failed: One couldn't be made together, as another rank has left, or died.
    """

    def __init__(self, worker: Worker) -> None:
        """Nothing is made yet. Args: worker: Whose lane waits."""
        self._worker = worker
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._waiting: dict[Future[str | None], int] = {}  # for which call each is; it ends with why it was left
        self._left: list[Future[None]] = []  # each ends with what the lane has left
        self._gives_up: Future[None] = Future()
        self.has_failed = False

    def begins(self, name: str) -> None:
        """A group is made from here on: nobody can have begun anything on it here."""
        with self._lock:
            self._unfinished.add(name)

    def ends(self, name: str) -> None:
        """It is there, or won't be."""
        with self._lock:
            self._unfinished.discard(name)

    def unfinished(self) -> set[str]:
        """The names of those that are being made."""
        with self._lock:
            return set(self._unfinished)

    def wait_for(self, name: str, join: Callable[[], Make | None], withdraw: Callable[[], bool]) -> None:
        """Have a group made, and wait for it. On the lane, or a thread of a role's.

        Args:
            name: The group's.
            join: Waits for the other ranks, on a thread of its own; what makes the group and keeps it, on the same one,
                or None if one of them doesn't make it.
            withdraw: Says on another thread that this rank doesn't make it, unless all of them do; whether they do.

        Raises:
            Consequence: The lane has left, or another rank has.
            Exception: It couldn't be made.
        """
        wait, over = self.begin_wait(), Future[None]()
        if wait.done():  # nothing is begun: no rank makes a group twice at once
            raise Consequence(self.ended(wait) or "")

        def run() -> None:
            try:
                if (make := join()) is None:
                    raise Consequence(f"another rank doesn't make the process group {name!r}")
                self.begins(name)
                try:
                    make()
                finally:
                    self.ends(name)
            except Exception as error:
                self._end(wait, error)
            else:
                self._end(wait, None)
            self._end(over, None)

        # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish its half.
        _on_a_thread(run)
        if (reason := self.ended(wait)) is not None:
            self._left.append(over)

            def leave() -> None:
                if not withdraw():
                    self._end(over, None)

            _on_a_thread(leave)
            raise Consequence(reason)

    def _end(self, wait: Future[Any], error: Exception | None) -> None:
        with self._lock:
            if wait.done():
                return
            if error is None:
                wait.set_result(None)
            else:
                self.has_failed = True
                wait.set_exception(error)

    def begin_wait(self) -> Future[str | None]:
        """What ends when the lane needn't wait any longer; with the reason, if what it waits for isn't there."""
        wait: Future[str | None] = Future()
        with self._lock:
            self._waiting[wait] = self._worker.asking() or 0
        if (reason := self._worker.why_not()) is not None:
            with self._lock:
                if not wait.done():
                    wait.set_result(reason)
        return wait

    def ended(self, wait: Future[str | None]) -> str | None:
        """Wait for that; why it was left."""
        try:
            return wait.result()
        finally:
            with self._lock:
                del self._waiting[wait]

    def end_wait(self, wait: Future[str | None]) -> None:
        """What the lane waits for is decided elsewhere, and has been."""
        self._end(wait, None)

    def end_waits(self, seq: int, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in a call from `seq` on: they may never come."""
        with self._lock:
            for wait, asked in self._waiting.items():
                if asked >= seq and not wait.done():
                    wait.set_result(reason)

    def back(self) -> None:
        """The lane runs nothing: wait until what it has left, if anything, is there or won't be, or the worker ends."""
        while self._left:
            futures.wait([self._left.pop(), self._gives_up], return_when=futures.FIRST_COMPLETED)
        self.has_failed = False

    def give_up(self) -> None:
        """The worker ends, from any thread: a peer that has died may be waited for without end."""
        self._end(self._gives_up, None)

    def close(self, within_s: float) -> None:
        """The lane has ended: wait so long for what it has left."""
        futures.wait(self._left, within_s)


def _on_a_thread(what: Callable[[], object]) -> None:
    threading.Thread(target=what, name="colocate-process-group", daemon=True).start()
