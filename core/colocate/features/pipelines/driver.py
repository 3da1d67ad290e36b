"""Calls made in a `group.pipeline()` block are sent when the block ends, as one message per worker.

A pipeline belongs to the thread or task that entered the block; calls of other threads and tasks are sent at once.
Blocks of one thread nest, for one group or several: the outermost block sends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from colocate._calls.failures import unsent_error
from colocate._calls.pending import UnsentCalls
from colocate._calls.sending import OPEN, Draft, Messages, send, set_timeouts
from colocate._owned.owned import count_forks
from colocate._system.here import ThreadTask
from colocate._system.lines import find_caller
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, PipelineError
from colocate.wire import Packed

_EDGE_BYTES = 64


class Pipeline(UnsentCalls):
    """The recorded calls of one thread's or task's open pipelines."""

    def __init__(self) -> None:
        self.is_open = True
        self.worker_groups: list[WorkerGroup] = []
        self._drafts: list[Draft] = []
        self._memory = ArgumentMemory()
        self._creator = ThreadTask()
        self._forks = count_forks()
        file, line = find_caller()
        self._line = f"{file}:{line}"

    @property
    def is_here(self) -> bool:
        """Whether the current thread and task opened this pipeline."""
        return self.is_open and self._creator.is_current

    def records(self, worker_group: WorkerGroup) -> bool:
        """Return whether this pipeline records calls that the current thread or task makes on a group."""
        return worker_group in self.worker_groups and self.is_here

    def check_can_wait(self, label: str, awaits: bool) -> None:
        """Refuse a wait inside the block, because the call is sent only when the block ends."""
        if self.is_here if awaits else self._creator.is_current_thread:
            raise PipelineError(
                f"{label} is sent when the block of group.pipeline() at {self._line} ends, so its result isn't known "
                "before: ask for it after the block (in a signal handler, set a flag, and check it after the block)"
            )

    def refuse_call(self, label: str, how: str = "") -> None:
        """Refuse a blocking call. `how` is an optional hint for the error text, which must end in ", or "."""
        raise PipelineError(
            f"{label} would wait for its result, but calls inside the block of group.pipeline() at {self._line} are "
            f"sent when the block ends: {how}call it before or after the block (in a signal handler, set a flag, and "
            "check the flag after the block)"
        )

    # -- recording

    def add_draft(self, draft: Draft) -> None:
        """Record a call, and lend the residents among the arguments to the call."""
        snapshots = {id(body): self._memory.snapshot(body) for body in draft.bodies}
        draft.bodies = [snapshots[id(body)] for body in draft.bodies]
        draft.call.unsent, resident = self, draft.record
        if resident is not None:
            # The pin keeps the result alive on the workers until the call has been sent.
            draft.pin = draft.worker_group.residents.pin(resident)
        draft.lend()
        self._drafts.append(draft)
        if resident is not None:
            # The record is added before the call is sent, so that a restart of the group reports the loss.
            draft.worker_group.residents.add_record(resident)

    # -- the block

    def __len__(self) -> int:
        return len(self._drafts)

    def abandon_drafts(self, start: int, error: BaseException) -> None:
        """Fail the recorded calls from index `start` on, because their block ended with an exception."""
        drafts: list[Draft] = []
        while len(self._drafts) > start:  # A signal handler may add calls meanwhile.
            drafts.append(self._drafts.pop())
        text = str(error).partition("\n")[0]
        for draft in reversed(drafts):
            reason = PipelineError(
                f"{draft.call.label} of group {draft.worker_group.name!r} was never sent: the block of "
                f"group.pipeline() at {self._line} ended with {type(error).__name__}{': ' if text else ''}{text}",
                group=draft.worker_group.name,
                role=draft.call.role or None,
                method=draft.call.method,
            )
            _fail_draft(draft, reason)

    def send_drafts(self) -> None:
        """Send all recorded calls. May run on any thread.

        Raises:
            ColocateError: A group can't be called any more. Its calls, and those of later groups, fail with this error.
        """
        try:
            self.is_open = False
            worker_groups = list(dict.fromkeys(draft.worker_group for draft in self._drafts))
            for worker_group in worker_groups:
                worker_group.check_usable()
            lots = [
                [draft for draft in self._drafts if draft.worker_group is worker_group]
                for worker_group in worker_groups
            ]
            for worker_group, lot, messages in zip(worker_groups, lots, [Messages(lot) for lot in lots], strict=True):
                for draft in lot:
                    draft.call.submitted = time.time()
                _send_messages(messages)
                for draft in lot:
                    if draft.record is not None:
                        worker_group.residents.flush_later()
                    draft.record = draft.pin = None
        except BaseException as error:
            self._fail_drafts(error)
            raise

    def _fail_drafts(self, error: BaseException) -> None:
        for draft in self._drafts:
            if draft.call.seq < 0 or draft.call._error is error:
                _fail_draft(draft, error)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child, which owns none of the calls."""
        return self._forks != count_forks()


def _fail_draft(draft: Draft, error: BaseException) -> None:
    draft.call.handle = None
    draft.worker_group.order.drop_call(draft.call, unsent_error(draft.call, error))
    resident = draft.record
    if resident is not None:
        draft.record = draft.pin = None
        resident.is_used = True  # The block has raised the error, so the failure needn't be reported again.
        reason = error if isinstance(error, ColocateError) else PipelineError(f"{draft.call.label} was never sent")
        draft.worker_group.residents.fail_borrowers(resident, reason)


def _send_messages(messages: Messages) -> None:
    drafts = messages.drafts
    worker_group = drafts[0].worker_group
    sent: Sequence[Draft] = ()
    try:
        with worker_group.order.lock:
            worker_group.check_usable()
            for draft in drafts:
                if draft.record is not None:
                    worker_group.residents.add_record(draft.record)
            ready = [draft for draft in drafts if not _is_lost(draft)]
            if ready:
                sent = send(messages if len(ready) == len(drafts) else Messages(ready))
    finally:
        messages.discard()
    set_timeouts(sent)


def _is_lost(draft: Draft) -> bool:
    """Fail an unsent call that uses a poisoned or lost resident. Return whether the call is done."""
    losses = (use._kept.loss for use in draft.call.uses if use._kept.loss is not None)
    poison = None if draft.call.done() else draft.call.find_poison() or next(losses, None)
    if poison is not None:
        draft.worker_group.order.drop_call(draft.call, poison)
    return draft.call.done()


@contextmanager
def pipeline(worker_group: WorkerGroup) -> Iterator[None]:
    """Collect the block's calls on a group, and send one message per worker when the block ends."""
    outer = OPEN.get()
    if isinstance(outer, Pipeline) and outer.is_here:
        with _nested(outer, worker_group):
            yield
        return
    current = Pipeline()
    current.worker_groups.append(worker_group)
    try:
        OPEN.set(current)
        yield
        OPEN.set(None)
        if not current.is_forked:
            current.send_drafts()
    except BaseException as error:
        if current.is_open and not current.is_forked:  # No call of the block has been sent.
            current.is_open = False
            current.abandon_drafts(0, error)
        raise
    finally:
        OPEN.set(None)


@contextmanager
def _nested(outer: Pipeline, worker_group: WorkerGroup) -> Iterator[None]:
    groups, start = list(outer.worker_groups), len(outer)
    outer.worker_groups.append(worker_group)
    try:
        yield
    except BaseException as error:
        if not outer.is_forked:
            outer.abandon_drafts(start, error)
            outer.worker_groups[:] = groups
        raise


class ArgumentMemory:
    """Copies the buffers of arguments when a call is recorded. Equal buffers are copied and sent only once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, bytes, bytes], list[memoryview]] = {}

    def snapshot(self, body: Any) -> Any:
        """Return the body with copies of the buffers, so that later writes to the arguments don't change the call."""
        if not isinstance(body, Packed) or not body.buffers:
            return body
        return Packed(body.data, tuple(self._copy(buffer) for buffer in body.buffers), body.needs)

    def _copy(self, buffer: memoryview) -> memoryview:
        key = buffer.nbytes, bytes(buffer[:_EDGE_BYTES]), bytes(buffer[-_EDGE_BYTES:])
        copies = self._copies.setdefault(key, [])
        # Comparing with the underlying bytearray takes only one memcmp.
        copied = next((copy for copy in copies if copy.obj == buffer), None)
        if copied is None:
            copied = memoryview(bytearray(buffer))
            copies.append(copied)
        return copied
