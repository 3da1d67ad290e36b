"""Checkpoints in progress: the driver's requests to workers, and the handle of a checkpoint that is being written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colocate._calls.failures import failure_error
from colocate._calls.pending import PendingCall
from colocate._protocol.requests import Requests
from colocate._role.call import CallFuture
from colocate._system.deadline import NEVER
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ForkedError
from colocate.features.checkpoints.checkpoint import Tag
from colocate.features.checkpoints.messages import AskState, SavedState


class SaveRequests:
    """The driver's requests about checkpoints to the workers of one generation of a group."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        self._send = link.make_sender()
        self._slots = range(link.size)
        self._requests: Requests[int, SavedState] = Requests(link.base)
        self._error: ColocateError | None = None

    def finish_saves(self, folder: Path) -> None:
        """Run the rest of `save` on all ranks, and wait until all files are written.

        Raises:
            RoleError: The rest of a `save` has failed.
            ColocateError: The group has failed or is closed.
        """
        while any(report.has_more for report in self._ask_workers(dict.fromkeys(self._slots), folder)):
            pass  # The next step begins when all ranks have finished this one.

    def inspect_files(self, folder: Path, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the names of open files, and the digests of all files by name. Each worker reads a share of the files.

        Raises:
            RoleError: A file can't be read.
            ColocateError: The group has failed or is closed.
        """
        reports = self._ask_workers({slot: names[slot :: len(self._slots)] for slot in self._slots}, folder)
        digests = {name: digest for report in reports for name, digest in report.digests.items()}
        return [name for report in reports for name in report.open_files], digests

    def _ask_workers(self, shares: Mapping[int, Sequence[str] | None], folder: Path) -> list[SavedState]:
        def ask(slot: int, token: int) -> None:
            self._send(slot, AskState(token, str(folder), shares[slot]))

        return self._requests.ask(self._slots, ask, NEVER, lambda owing: owing)

    def on_answer(self, worker: Worker, told: SavedState, body: Any) -> None:
        """Record a worker's answer, or fail the request with the worker's error."""
        if told.failure is None:
            self._requests.add_answer(told.token, worker.slot, told)
            return
        call = PendingCall("the checkpoint", told.failure.role or "", "save", [worker.slot], [worker.slot])
        self._requests.add_refusal(told.token, failure_error(self._link, call, worker.slot, told.failure, body))

    def fail_requests(self, error: ColocateError) -> None:
        """Fail all pending and future requests, with the error of the first call of this method."""
        if self._error is None:
            self._error = error
        self._requests.fail_all(self._error)

    def check_failure(self) -> None:
        """Raise the error that was passed to `fail_requests`, if there was one."""
        if self._error is not None:
            raise copy.copy(self._error)


class Saving(CallFuture):
    """The handle of a checkpoint in progress: all roles have copied their states, and files are being written.

    Attributes:
        tag: The user's label.
        folder: The final folder.
        is_void: Whether the group has failed before the end; that failure is reported elsewhere.
    """

    __slots__ = ("_is_requested", "_link", "folder", "is_void", "tag")

    def __init__(self, link: WorkerGroup, tag: Tag, folder: Path) -> None:
        super().__init__(f"the checkpoint {tag!r}")
        self._link, self.tag, self.folder = link, tag, folder
        self._is_requested = self.is_void = False

    @property
    def is_open(self) -> bool:
        """Whether the checkpoint is in progress, or has failed and no caller has seen the error."""
        return not (self.is_set and (self._is_requested or self._error is None))

    def unreported_failure(self) -> BaseException | None:
        """Wait until the checkpoint ends, and return the error unless a caller has already seen the error."""
        self.wait()
        return None if self._is_requested or self.is_void else self._take_error()

    def _wait(self, timeout: float | None) -> None:
        if self._link.is_forked:
            raise ForkedError(f"{self.label} is written by the process that forked this one; its end is told there")
        super()._wait(timeout)

    def _take_error(self) -> BaseException | None:
        self._is_requested = True
        return super()._take_error()

    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        if own:
            callback(self)
        else:
            self._link.services.dispatcher.call_soon(partial(callback, self))
