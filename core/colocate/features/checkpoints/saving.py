"""Checkpoints that are written beside the calls: what workers are asked for, and the one that is under way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colocate._calls.failures import failure_error
from colocate._calls.pending import PendingCall
from colocate._protocol.requests import Requests
from colocate._role.call import Underway
from colocate._system.deadline import NEVER
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ForkedError
from colocate.features.checkpoints.checkpoint import Tag
from colocate.features.checkpoints.messages import AskSaved, Saved


class Saves:
    """What the workers of one generation of a group are asked of a checkpoint, beside their calls."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        self._tell = link.teller()
        self._slots = range(link.size)
        self._requests: Requests[int, Saved] = Requests(link.base)
        self._error: ColocateError | None = None

    def finish(self, folder: Path) -> None:
        """Have all write what their roles have taken, and wait for it.

        Raises:
            RoleError: What a `save` had left to do has failed.
            ColocateError: The group is gone.
        """
        while any(told.more for told in self._ask(dict.fromkeys(self._slots), folder)):
            pass  # all have come as far

    def look(self, folder: Path, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return which files of a checkpoint some worker is writing yet, and the digests of all; each reads its share.

        Raises:
            RoleError: One can't be read.
            ColocateError: The group is gone.
        """
        found = self._ask({slot: names[slot :: len(self._slots)] for slot in self._slots}, folder)
        digests = {name: digest for told in found for name, digest in told.digests.items()}
        return [name for told in found for name in told.open], digests

    def _ask(self, shares: Mapping[int, Sequence[str] | None], folder: Path) -> list[Saved]:
        def ask(slot: int, token: int) -> None:
            self._tell(slot, AskSaved(token, str(folder), shares[slot]))

        return self._requests.ask(self._slots, ask, NEVER, lambda owing: owing)

    def answered(self, worker: Worker, told: Saved, body: Any) -> None:
        """Take a worker's answer."""
        if told.failure is None:
            self._requests.answered(told.token, worker.slot, told)
            return
        call = PendingCall("the checkpoint", told.failure.role or "", "save", [worker.slot], [worker.slot])
        self._requests.refused(told.token, failure_error(self._link, call, worker.slot, told.failure, body))

    def fail(self, error: ColocateError) -> None:
        """Fail what was asked, or will be: nobody waits for an answer, or none will come."""
        if self._error is None:
            self._error = error
        self._requests.fail_all(self._error)

    def check(self) -> None:
        """Raise what that has failed of."""
        if self._error is not None:
            raise copy.copy(self._error)


class Saving(Underway):
    """A checkpoint of which all roles have taken their states, and which is being written.

    Attributes:
        tag: What its writer calls it.
        folder: Where it will be.
        is_void: Whether its group has failed meanwhile, which is told by itself.
    """

    __slots__ = ("_is_asked", "_link", "folder", "is_void", "tag")

    def __init__(self, link: WorkerGroup, tag: Tag, folder: Path) -> None:
        super().__init__(f"the checkpoint {tag!r}")
        self._link, self.tag, self.folder = link, tag, folder
        self._is_asked = self.is_void = False

    @property
    def is_open(self) -> bool:
        """Whether it is under way, or nobody was told what it has failed of."""
        return not (self.is_set and (self._is_asked or self._error is None))

    def unreported_failure(self) -> BaseException | None:
        """Wait until it is over; what it has failed of, unless somebody was told."""
        self.wait()
        return None if self._is_asked or self.is_void else self._failure()

    def _wait(self, timeout: float | None) -> None:
        if self._link.forked:
            raise ForkedError(f"{self.label} is written by the process that forked this one; its end is told there")
        super()._wait(timeout)

    def _failure(self) -> BaseException | None:
        self._is_asked = True
        return super()._failure()

    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        if own:
            callback(self)
        else:
            self._link.services.dispatcher.soon(partial(callback, self))
