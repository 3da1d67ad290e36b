"""Pauses the lanes of background roles in a worker, and reports when the roles are at rest."""

from __future__ import annotations

from functools import partial
from typing import Any

from colocate._protocol.message import Message
from colocate.features.pausing.messages import GoOn, Pause, PauseAfter, Paused, Pausing
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker


class PausingOfWorker(OfWorker):
    """Passes the driver's pause messages to the lanes of background roles (`lane_order`)."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context

    def heard(self, message: Message, body: Any) -> None:
        """Pause or resume the lane of a background role."""
        context = self._worker_context
        match message:
            case Pause():
                context.say(Pausing(message.token, context.lane_for(message.lane).pause(message.token)))
            case PauseAfter():
                rests = partial(context.say, Paused(message.token))
                context.lane_for(message.lane).pause_after(message.number, message.last, message.keeps, rests)
            case GoOn():
                context.lane_for(message.lane).go_on(message.number)
            case _:
                raise AssertionError(message)
