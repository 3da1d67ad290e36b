"""Process groups that are being made, and the lane where it waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from colocate._protocol.message import Message


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
        has_failed: One couldn't be made, though all its ranks had been there to make it.
    """

    def __init__(self, worker: Worker) -> None:
        """Nothing is made yet. Args: worker: Whose lane waits."""
        self._worker = worker
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._waiting: tuple[int, Future[str | None]] | None = None  # for which call; why it was left, if it was
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

    def begin_wait(self) -> Future[str | None]:
        """What ends when the lane needn't wait any longer; with the reason, if what it waits for isn't there."""
        left: Future[str | None] = Future()
        with self._lock:
            self._waiting = self._worker.asking() or 0, left
        if (reason := self._worker.why_not()) is not None:
            self.end_waits(-1, reason)
        return left

    def made(self, name: str, left: Future[str | None], keep: Callable[[], object]) -> bool:
        """A group is there, and is kept for who waits; whether anybody does."""
        with self._lock:
            self._unfinished.discard(name)
            if left.done():
                return False
            keep()
            left.set_result(None)
            return True

    def failed(self, name: str, left: Future[str | None], error: Exception) -> None:
        """It couldn't be made, which who waits is told."""
        with self._lock:
            self._unfinished.discard(name)
            if not left.done():
                self.has_failed = True
                left.set_exception(error)

    def end_wait(self, left: Future[str | None]) -> None:
        """What the lane waits for is decided elsewhere, and has been."""
        with self._lock:
            if not left.done():
                left.set_result(None)

    def end_waits(self, seq: int, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in a call from `seq` on: they may never come."""
        with self._lock:
            if self._waiting is not None and self._waiting[0] >= seq and not self._waiting[1].done():
                self._waiting[1].set_result(reason)

    def back(self) -> None:
        """The lane runs nothing."""
        self.has_failed, self._waiting = False, None
