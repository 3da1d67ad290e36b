"""The worker's side of calls with rows that end one by one. `calls.py` is the driver's side.

For a method with `rows=`, each row is a task of the lane's event loop. Rows yielded by a batched method are sent one
by one, and the method continues only while the driver gives credit for more rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from colocate._protocol.consequence import Consequence
from colocate._role.context import RowState, running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.tracebacks import rebuilding
from colocate._values.leaving import detach_value, place_arguments
from colocate.features.rows.messages import RowEnded
from colocate.features.rows.row_queue import RowQueue, RowsWork
from colocate.features.rows.row_stream import YieldedItems, end_row
from colocate.worker.background import Background
from colocate.worker.birth.ending import RoleCode
from colocate.worker.context import WorkerContext
from colocate.worker.results import list_sources
from colocate.worker.serving import failure
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code


class RowTasks:
    """Runs calls with rows that end one by one. Used on the lane."""

    def __init__(self, worker_context: WorkerContext, background: Background | None) -> None:
        """Prepare for the calls of one lane.

        Args:
            worker_context: The context of the worker.
            background: The background role of the lane; None for the main lane.
        """
        self._worker_context, self._background = worker_context, background
        self._device = worker_context.device if background is None else background.device
        self._role_code = RoleCode(has_thread=False)  # Each row enters this context while role code runs.

    def get_runner(self, work: RowsWork, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return the function that runs the rows of a call (see `WorkerFeature.get_runner`)."""
        spec: MethodSpec = work.spec
        if work.row_queue is not None:
            work.row_queue.begin_call(self._worker_context.scope, work.seq)

        def run(instance: object, arguments: dict[str, Any]) -> Any:
            if work.row_queue is not None:
                # `is_alone` is set before `withdrawn` is read, because another thread may withdraw the call meanwhile.
                work.row_queue.is_alone = (
                    spec.rows is not None or len(list_sources(spec, role.ctx)) == role.ctx.world_size
                )
                work.cancelled = work.cancelled or (work.row_queue.withdrawn and work.row_queue.is_alone)
            if spec.rows is not None:
                return self._run_rows(work, role, arguments)
            if work.row_queue is None:  # The rows stay on the worker.
                return (_collect_all_async if spec.is_async else _collect_all)(work, spec, instance, arguments)
            items, yielded = spec.call(instance, arguments), YieldedItems(work.label, work.valid_rows or 0)
            if spec.is_async:
                return self._read_items_async(work, role, spec, items, yielded)
            return self._read_items(work, role, spec, items, yielded)

        return run

    # -- rows that the driver gives

    async def _run_rows(self, work: RowsWork, role: RoleInstance, arguments: dict[str, Any]) -> None:
        row_queue, spec = _get_queue(work), work.spec
        try:
            while True:
                row_queue.check_waiting()
                keeps = self._background is not None and self._background.is_pausing()
                while row_queue.rows and not (keeps or row_queue.withdrawn or row_queue.stopped):
                    row, body = row_queue.rows.popleft()
                    state = RowState(work.seq, row=row, call=work)
                    state.place = spec.name, row_queue.number
                    task = asyncio.ensure_future(self._run_row(work, role, arguments, state, body))
                    row_queue.running[state] = task
                    work.active_tasks += 1
                    task.add_done_callback(partial(self._on_row_over, work, role, state))
                if row_queue.withdrawn:
                    row_queue.cancel_rows()
                over = row_queue.stopped or row_queue.withdrawn or (row_queue.is_complete and not row_queue.rows)
                if over and not row_queue.running:
                    return
                await self._wait_for_event(work)
        finally:  # All rows must end before the call does.
            row_queue.cancel_rows()
            while row_queue.running:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([*row_queue.running.values()])
            row_queue.rows.clear()

    @calls_role_code
    async def _run_row(
        self, work: RowsWork, role: RoleInstance, arguments: dict[str, Any], state: RowState, body: Any
    ) -> None:
        worker_context, spec = self._worker_context, work.spec
        running_call.set(state)
        try:
            try:
                if worker_context.begin_checks and not spec.revives:
                    for begins in worker_context.begin_checks:
                        begins(role, (), work.label, state)
                with rebuilding("a row"):
                    row_arguments = worker_context.codec.unpack(body, worker_context.boot.device)
                if worker_context.moves_tensors:
                    row_arguments = place_arguments(row_arguments, worker_context.boot.device, spec.host)
                with self._role_code:
                    result = await spec.call(role.instance, {**arguments, **row_arguments})
                for ends in worker_context.end_checks:
                    ends(role, work.began, state)
            finally:
                await end_row(state)
                if state.raised is not None:
                    raise state.raised from None
            self._send_row(work, state.row, result, state.turn)
        except BaseException as error:  # Every error of role code is the row's error.
            await worker_context.await_cause(error, role.name, state)
            self._send_failure(work, role, state, error)

    def _send_failure(self, work: RowsWork, role: RoleInstance, state: RowState, error: BaseException) -> None:
        if not _get_queue(work).is_wanted(state):
            return
        worker_context = self._worker_context
        error = worker_context.explain_failure(error, role.name, state)
        secondary = isinstance(error, Consequence)
        failed_call, body = failure.describe_failure(
            error, worker_context.codec, worker_context.definitions, role.name, secondary
        )
        bereft = any(part.fails_other_rows(role) for part in worker_context.parts.values())
        worker_context.send_message(RowEnded(work.seq, state.row, failed_call, bereft, state.turn), body)
        if (lost := self._device.explain_loss()) is not None:
            self._worker_context.report_broken(f"{work.label}, row {state.row}: {lost}")

    def _on_row_over(self, work: RowsWork, role: RoleInstance, state: RowState, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # The task was cancelled before `_run_row` began, which handles later cancellations.
            self._send_failure(work, role, state, state.raised or asyncio.CancelledError())
        work.active_tasks -= 1
        _get_queue(work).on_row_over(state)

    def _send_row(self, work: RowsWork, row: int, result: Any, turn: int | None) -> None:
        worker_context, label = self._worker_context, work.label
        if self._device.is_gpu:
            self._device.finish_call(label)
        if result is not None:
            result = detach_value(result, self._device.is_volatile)
        body = None if result is None else worker_context.pack_result(result, label)
        worker_context.send_result(RowEnded(work.seq, row, None, turn=turn), body, label)

    async def _wait_for_event(self, work: RowsWork) -> None:
        """Wait for a message about the call. Meanwhile the call is at a pause point."""
        news = _get_queue(work).next_event()
        if self._background is None:
            await news
        else:
            await self._background.lane.async_wait_at_pause(work, news)

    # -- rows that a method yields

    # If ranks share rows, a withdrawn call runs to the end, because no rank may leave a collective step early.

    @staticmethod
    def _make_over_check(row_queue: RowQueue, is_alone: bool) -> Callable[[], bool]:
        return lambda: row_queue.stopped or row_queue.ended is not None or (row_queue.withdrawn and is_alone)

    @calls_role_code
    def _read_items(
        self, work: RowsWork, role: RoleInstance, spec: MethodSpec, items: Iterator[Any], yielded: YieldedItems
    ) -> None:
        row_queue = _get_queue(work)
        tells, is_alone = role.ctx.rank in list_sources(spec, role.ctx), row_queue.is_alone
        try:
            while True:
                if self._background is not None:
                    self._background.wait_at_pause(
                        work,
                        lambda: bool(row_queue.credit) or not tells or not yielded.remaining,
                        self._make_over_check(row_queue, is_alone),
                    )
                elif tells and yielded.remaining and not row_queue.credit:
                    self._worker_context.lane.on_waiting()
                    row_queue.wait_until_ready()
                row_queue.check_waiting()
                if row_queue.stopped or (row_queue.withdrawn and is_alone):
                    return
                try:
                    item = next(items)
                except StopIteration:
                    break
                row, value = yielded.take_item(item)
                if tells and not row_queue.withdrawn:
                    row_queue.credit -= 1
                    self._send_row(work, row, value, work.turn)
                del item, value
        finally:
            items.close()  # type: ignore[attr-defined]
        if not work.cancelled:
            yielded.check_end()

    @calls_role_code
    async def _read_items_async(
        self, work: RowsWork, role: RoleInstance, spec: MethodSpec, items: AsyncIterator[Any], yielded: YieldedItems
    ) -> None:
        row_queue = _get_queue(work)
        tells, is_alone = role.ctx.rank in list_sources(spec, role.ctx), row_queue.is_alone
        try:
            while True:
                is_over = self._make_over_check(row_queue, is_alone)
                while (tells and yielded.remaining and not row_queue.can_proceed) or (
                    self._background is not None and self._background.is_pausing() and not is_over()
                ):
                    await self._wait_for_event(work)
                row_queue.check_waiting()
                if row_queue.stopped or (row_queue.withdrawn and is_alone):
                    return
                row_queue.awaiting = waiting = asyncio.current_task() if is_alone else None
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    break
                except asyncio.CancelledError:
                    if waiting is None or row_queue.awaiting is not None or work.pending_error is not None:
                        raise
                    waiting.uncancel()  # Nobody reads the results any more.
                    return
                finally:
                    row_queue.awaiting = None
                row, value = yielded.take_item(item)
                if tells and not row_queue.withdrawn:
                    row_queue.credit -= 1
                    self._send_row(work, row, value, work.turn)
                del item, value
        finally:
            await items.aclose()  # type: ignore[attr-defined]
        if not work.cancelled:
            yielded.check_end()


def _get_queue(work: RowsWork) -> RowQueue:
    assert work.row_queue is not None
    return work.row_queue


@calls_role_code
def _collect_all(work: RowsWork, spec: MethodSpec, instance: object, arguments: dict[str, Any]) -> list[Any]:
    yielded = YieldedItems(work.label, work.valid_rows or 0)
    values = dict(map(yielded.take_copy, spec.call(instance, arguments)))
    yielded.check_end()
    return [values[row] for row in sorted(values)]


@calls_role_code
async def _collect_all_async(
    work: RowsWork, spec: MethodSpec, instance: object, arguments: dict[str, Any]
) -> list[Any]:
    yielded = YieldedItems(work.label, work.valid_rows or 0)
    values = dict([yielded.take_copy(item) async for item in spec.call(instance, arguments)])
    yielded.check_end()
    return [values[row] for row in sorted(values)]
