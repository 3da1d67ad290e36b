"""`RowsOfWorker`, which holds the row queues of a worker. `tasks.py` runs the rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from colocate._protocol.message import Message
from colocate._protocol.to_worker import Call
from colocate.features.rows.messages import NoMoreRows, ReadRows, Row
from colocate.features.rows.row_queue import RowQueue, RowsWork
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance


class RowsOfWorker(WorkerFeature):
    """The row queues of a worker's calls. Each queue exists as long as the call."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._row_queues: weakref.WeakValueDictionary[int, RowQueue] = weakref.WeakValueDictionary()
        worker_context.scope.add_ender(self._end_waits)

    def create_work(self, *arguments: Any) -> RowsWork:
        """Create the lane's work for a call.

        The work gets a row queue, unless the result stays on the worker.
        """
        work = RowsWork(*arguments)
        call = work.message
        assert isinstance(call, Call)
        if call.keep is None:
            work.concurrency = min(work.concurrency, 1)
            work.row_queue = self._row_queues[work.seq] = RowQueue(self._worker_context.lane_for(call.role))
        return work

    def get_runner(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return the function that runs the rows of a call."""
        from colocate.features.rows.tasks import RowTasks  # This module imports asyncio, which other calls don't need.

        assert isinstance(work, RowsWork)
        return RowTasks(self._worker_context, self._worker_context.background.get(role.name or "")).get_runner(
            work, role
        )

    def on_message(self, message: Message, body: Any) -> None:
        """Pass a message about rows to the call's queue, and wake the lane."""
        assert isinstance(message, Row | NoMoreRows | ReadRows)
        if (row_queue := self._row_queues.get(message.seq)) is not None:  # A call that has failed here has no queue.
            row_queue.on_message(message, body)
            if row_queue.withdrawn and row_queue.is_alone:
                row_queue.lane.cancel_calls(message.seq, message.seq)
            row_queue.lane.run_action(row_queue.notify_waiters)

    def hold_report(self, hold: int) -> dict[str, int]:
        """Return how many calls of each method with `rows=` ran on this worker, for a new driver."""
        roles = self._worker_context.roles.values()
        return {
            f"{role.name}.{name}": count
            for role in roles
            for name, count in role.ctx._calls.items()
            if (spec := role.methods.get(name)) is not None and spec.rows is not None
        }

    def on_call_cancelled(self, seq: int) -> None:
        """End the waits of a cancelled call."""
        if (row_queue := self._row_queues.get(seq)) is not None:
            row_queue.end_waits("nobody waits for it any more")

    def on_group_closing(self) -> None:
        """Prevent the start of further rows in all calls."""
        for row_queue in list(self._row_queues.values()):
            row_queue.stop_rows()
            row_queue.lane.run_action(row_queue.notify_waiters)

    def _end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        for number, row_queue in list(self._row_queues.items()):
            if row_queue.has_begun and concerns(number):  # Other calls check the scope when they begin.
                row_queue.end_waits(reason)
                row_queue.lane.run_action(row_queue.notify_waiters)
