"""Pauses the lanes of background roles in a worker, and reports when the roles are at rest."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocate._protocol.message import Message
from colocate.features.pausing.messages import Pause, PauseAfter, PauseBegun, ResumeRole, RoleAtRest
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature


class PausingOfWorker(WorkerFeature):
    """Passes the driver's pause messages to the lanes of background roles (`lane_order`)."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context

    def on_message(self, message: Message, body: Any) -> None:
        """Pause or resume the lane of a background role."""
        context = self._worker_context
        match message:
            case Pause():
                context.send_message(PauseBegun(message.token, context.lane_for(message.lane).pause(message.token)))
            case PauseAfter():
                rests = partial(context.send_message, RoleAtRest(message.token))
                context.lane_for(message.lane).pause_after(message.number, message.last, message.keeps, rests)
            case ResumeRole():
                context.lane_for(message.lane).end_pause(message.number)
            case _:
                raise AssertionError(message)
