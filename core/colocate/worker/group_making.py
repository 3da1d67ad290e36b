"""Process groups that are being made, and the lane where it waits for one.

A lane that is called back leaves, but its rank isn't back before what it has left is there, on all ranks, or is known
never to be (`torch_meetings`): who comes next finds nothing half made, and nothing that will be there later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from functools import partial
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
        self._unfinished: dict[str, str] = {}  # names, by what their ranks meet under
        self._running: dict[str, Future[None]] = {}  # by the same; each ends with what is made there
        self._waiting: dict[Future[str | None], tuple[int, Future[None] | None]] = {}  # for which call, and for what
        self._left: list[Future[None]] = []
        self._gives_up: Future[None] = Future()
        self.has_failed = False

    def begins(self, board: str, name: str) -> None:
        """A group is made from here on: nobody can have begun anything on it here."""
        with self._lock:
            self._unfinished[board] = name

    def ends(self, board: str) -> None:
        """It is there, or won't be."""
        with self._lock:
            self._unfinished.pop(board, None)

    def unfinished(self) -> set[str]:
        """The names of those that are being made."""
        with self._lock:
            return set(self._unfinished.values())

    def wait_for(self, board: str, name: str, join: Callable[[], Make | None], leave: Callable[[], bool]) -> None:
        """Have a group made, and wait for it. On the lane, or a thread of a role's.

        Args:
            board: What its ranks meet under.
            name: The group's.
            join: Waits for the other ranks, on a thread of its own; what makes the group and keeps it, on the same one,
                or None if one of them doesn't make it.
            leave: Says on another thread that this rank doesn't make it, unless all of them do; whether they have.

        Raises:
            Consequence: The lane has left, or another rank has.
            Exception: It couldn't be made.
        """
        with self._lock:
            over = self._running.get(board)
            begins = over is None
            over = self._running.setdefault(board, Future())
        wait = self.begin_wait(over)
        over.add_done_callback(lambda over: self._tell(wait, over.exception()))
        if begins and wait.done():  # nothing is begun any more
            self._is_over(board, over, Consequence(""))
        elif begins:
            # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish its half.
            _on_a_thread(partial(self._make, board, name, join, over))
        if (reason := self.ended(wait)) is not None:
            _on_a_thread(partial(self._leave, board, leave, over))
            raise Consequence(reason)

    def _make(self, board: str, name: str, join: Callable[[], Make | None], over: Future[None]) -> None:
        try:
            if (make := join()) is None:
                raise Consequence(f"another rank doesn't make the process group {name!r}")
            self.begins(board, name)
            try:
                make()
            finally:
                self.ends(board)
        except Exception as error:
            self._is_over(board, over, error)
        else:
            self._is_over(board, over, None)

    def _leave(self, board: str, leave: Callable[[], bool], over: Future[None]) -> None:
        try:
            made = leave()
        except RuntimeError as error:  # the store is gone, and so is who waits there
            self._is_over(board, over, error)
        else:
            if not made:
                self._is_over(board, over, Consequence("it was left"))

    def _is_over(self, board: str, over: Future[None], error: Exception | None) -> None:
        with self._lock:
            self._running.pop(board, None)
        with contextlib.suppress(InvalidStateError):  # it was left, and is known never to be made
            over.set_exception(error) if error is not None else over.set_result(None)

    def _tell(self, wait: Future[str | None], error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):  # it was left
            if error is None:
                wait.set_result(None)
            else:
                wait.set_exception(error)
                self.has_failed = True

    def begin_wait(self, over: Future[None] | None = None) -> Future[str | None]:
        """What ends when the lane needn't wait any longer; with the reason, if what it waits for isn't there.

        Args:
            over: What a rank that has left isn't back before.
        """
        wait: Future[str | None] = Future()
        with self._lock:
            self._waiting[wait] = self._worker.asking() or 0, over
        if (reason := self._worker.why_not()) is not None:
            with self._lock:
                self._call_back(wait, over, reason)
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
        self._tell(wait, None)

    def end_waits(self, seq: int, reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in a call from `seq` on: they may never come."""
        with self._lock:
            for wait, (asked, over) in self._waiting.items():
                if asked >= seq:
                    self._call_back(wait, over, reason)

    def _call_back(self, wait: Future[str | None], over: Future[None] | None, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):  # it isn't waited for any more
            wait.set_result(reason)
            if over is not None:
                self._left.append(over)

    def back(self) -> None:
        """The lane runs nothing: wait until what it has left, if anything, is there or won't be, or the worker ends."""
        while self._left and not self._gives_up.done():
            over = self._left[0]
            futures.wait([over, self._gives_up], return_when=futures.FIRST_COMPLETED)
            if over.done():
                self._left.remove(over)
        self.has_failed = False

    def give_up(self) -> None:
        """The worker ends, from any thread: a peer that has died may be waited for without end."""
        with contextlib.suppress(InvalidStateError):  # it has been told before
            self._gives_up.set_result(None)

    def close(self, within_s: float) -> None:
        """The lane has ended: wait so long for what it has left."""
        futures.wait(self._left, within_s)


def _on_a_thread(what: Callable[[], object]) -> None:
    threading.Thread(target=what, name="colocate-process-group", daemon=True).start()
