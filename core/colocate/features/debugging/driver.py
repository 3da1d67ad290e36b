"""The driver's half of debugging: the stopped ranks of a group, and the total time of the stops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from colocate._api.connection import live
from colocate._protocol.message import Message
from colocate._system.recent import Interval, length, merged
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError
from colocate.features.debugging.desk import Stop, desk_of, let_go_of_desk
from colocate.features.debugging.messages import Printed, Stopped, WentOn


class DebuggingOfGroup(OfGroup):
    """The driver's record of a group's stopped ranks."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._stops: dict[tuple[int, int], Stop] = {}  # Stops by slot and number, changed on the receiving thread.
        self._stood: list[Interval] = []  # The time intervals of former stops.

    def gives(self) -> Any:
        """Return the options for workers: whether errors in roles stop ranks, and the driver's PYTHONBREAKPOINT."""
        return self._worker_group.services.debugging

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's message about the begin, the output or the end of a stop."""
        assert isinstance(message, Stopped | Printed | WentOn)
        key = worker.slot, message.number
        stop = self._stops.get(key)
        if isinstance(message, Stopped):
            if stop is None:
                self._begin(worker, message)
            else:
                stop.where = message.where
        elif stop is not None:
            if isinstance(message, Printed) and stop.in_editor and not stop.goes_on:
                where = f"{message.text.strip()} of node {stop.node}"
                stop.announce(f"[colocate] {stop}, and waits for an editor (debugpy) at {where}")
            elif isinstance(message, Printed):
                desk_of(self).show(stop, message.text, message.asks)
            else:
                self._end(key, "goes on")

    def _begin(self, worker: Worker, told: Stopped) -> None:
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
            group.services.printer.line,
        )
        self._stops[worker.slot, told.number] = stop
        stop.in_editor = told.in_editor
        if any(other_group.services.is_ending for other_group in list(live.values())):
            stop.let_go(0)
        elif not stop.in_editor:
            desk_of(self).begin(stop)

    def let_go(self) -> None:
        """Resume all stopped ranks and prevent further stops on these workers, because the job is about to end."""
        for stop in list(self._stops.values()):
            stop.let_go(0)

    def _end(self, key: tuple[int, int], why: str) -> None:
        stop = self._stops.pop(key)
        stop.until = stop.until or time.time()
        self._stood = merged([*self._stood, (stop.since, stop.until)])
        if not stop.in_editor:
            desk_of(self).end(stop, why)

    def gone(self, worker: Worker) -> None:
        """End the stops of a worker that has exited or was lost."""
        for key in [stop_key for stop_key in list(self._stops) if stop_key[0] == worker.slot]:
            self._end(key, "has ended: its worker is gone")

    def failed(self, error: ColocateError) -> None:
        """Remove the failed group from the desk, which connects stopped ranks to terminals."""
        let_go_of_desk(self, self._worker_group.name, error.message.partition("\n")[0])

    def stood(self, since: float) -> float:
        """Return for how many seconds since a time at least one rank was stopped.

        The time after a rank was resumed doesn't count, because the rank may hang then.
        """
        spans = [*self._stood, *((stop.since, stop.until or time.time()) for stop in list(self._stops.values()))]
        return length((max(begin, since), end) for begin, end in spans if end > since)

    def stopped(self) -> Mapping[int, str]:
        """Return a text about the position of each stopped rank, by slot."""
        return {
            slot: f"rank {stop.rank} is stopped at {stop.where}"
            for (slot, _), stop in list(self._stops.items())
            if not stop.goes_on
        }
