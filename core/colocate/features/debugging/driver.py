"""The driver's half of debugging: the stopped ranks of a group, and the total time of the stops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from colocate._api.connection import live_connections
from colocate._protocol.message import Message
from colocate._system.recent import Interval, measure_length, merge_intervals
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError
from colocate.features.debugging.desk import Stop, get_desk, leave_desk
from colocate.features.debugging.messages import SessionResumed, SessionStarted, TerminalOutput


class DebuggingOfGroup(GroupFeature):
    """The driver's record of a group's stopped ranks."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._stops: dict[tuple[int, int], Stop] = {}  # Stops by slot and number, changed on the receiving thread.
        self._pauses: list[Interval] = []  # The time intervals of former stops.

    def worker_config(self) -> Any:
        """Return the options for workers: whether errors in roles stop ranks, and the driver's PYTHONBREAKPOINT."""
        return self._worker_group.services.debugging

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's message about the begin, the output or the end of a stop."""
        assert isinstance(message, SessionStarted | TerminalOutput | SessionResumed)
        key = worker.slot, message.number
        stop = self._stops.get(key)
        if isinstance(message, SessionStarted):
            if stop is None:
                self._add_stop(worker, message)
            else:
                stop.where = message.where
        elif stop is not None:
            if isinstance(message, TerminalOutput) and stop.in_editor and not stop.is_over:
                where = f"{message.text.strip()} of node {stop.node}"
                stop.print_line(f"[colocate] {stop}, and waits for an editor (debugpy) at {where}")
            elif isinstance(message, TerminalOutput):
                get_desk(self).show_text(stop, message.text, message.asks)
            else:
                self._end_stop(key, "goes on")

    def _add_stop(self, worker: Worker, told: SessionStarted) -> None:
        group = self._worker_group
        stop = Stop(
            group.name,
            worker.slot,
            worker.boot.node,
            told.number,
            told.role,
            told.label,
            told.rank,
            told.where,
            told.error,
            worker.send,
            group.services.printer.print_line,
        )
        self._stops[worker.slot, told.number] = stop
        stop.in_editor = told.in_editor
        if any(other_group.services.is_ending for other_group in list(live_connections.values())):
            stop.resume_rank(0)
        elif not stop.in_editor:
            get_desk(self).add_stop(stop)

    def resume_all(self) -> None:
        """Resume all stopped ranks and prevent further stops on these workers, because the job is about to end."""
        for stop in list(self._stops.values()):
            stop.resume_rank(0)

    def _end_stop(self, key: tuple[int, int], why: str) -> None:
        stop = self._stops.pop(key)
        stop.resumed_at = stop.resumed_at or time.time()
        self._pauses = merge_intervals([*self._pauses, (stop.since, stop.resumed_at)])
        if not stop.in_editor:
            get_desk(self).end_stop(stop, why)

    def on_worker_ended(self, worker: Worker) -> None:
        """End the stops of a worker that has exited or was lost."""
        for key in [stop_key for stop_key in list(self._stops) if stop_key[0] == worker.slot]:
            self._end_stop(key, "has ended: its worker is gone")

    def on_failed(self, error: ColocateError) -> None:
        """Remove the failed group from the desk, which connects stopped ranks to terminals."""
        leave_desk(self, self._worker_group.name, error.message.partition("\n")[0])

    def paused_seconds(self, since: float) -> float:
        """Return for how many seconds since a time at least one rank was stopped.

        The time after a rank was resumed doesn't count, because the rank may hang then.
        """
        spans = [*self._pauses, *((stop.since, stop.resumed_at or time.time()) for stop in list(self._stops.values()))]
        return measure_length((max(begin, since), end) for begin, end in spans if end > since)

    def stopped_slots(self) -> Mapping[int, str]:
        """Return a text about the position of each stopped rank, by slot."""
        return {
            slot: f"rank {stop.rank} is stopped at {stop.where}"
            for (slot, _), stop in list(self._stops.items())
            if not stop.is_over
        }
