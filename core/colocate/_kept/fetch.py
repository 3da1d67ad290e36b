"""Fetches: values of residents on their way from the workers to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._system.deadline import Deadline
from colocate.errors import ColocateError


class Refused(Exception):
    """A worker can't send its part: what it has told of that, and the exception as it travels."""

    def __init__(self, slot: int, failure: from_worker.Failure, body: Any) -> None:
        super().__init__(slot)
        self.slot, self.failure, self.body = slot, failure, body


class Fetches:
    """Asks workers for parts of residents and waits for all of them."""

    def __init__(self, ask: Callable[[int, Message], None], base: int = 0) -> None:
        """Args: ask: Sends a message to a slot's worker. base: Its numbers are above this."""
        self._ask = ask
        self._requests: Requests[int, tuple[int | None, Any]] = Requests(base)

    def get(self, slots: Sequence[int], key: int, contents: bool, deadline: Deadline) -> list[tuple[int | None, Any]]:
        """The answers of some slots, in their order; each is its rows and a body.

        Args:
            slots: The slots.
            key: The resident.
            contents: Whether the parts themselves are wanted, or their structure.
            deadline: Until when it waits.

        Raises:
            TimeoutError: They haven't come in time.
            Refused: A worker can't send its part.
            ColocateError: No answer will come any more.
        """

        def ask(slot: int, token: int) -> None:
            self._ask(slot, to_worker.Fetch(token, key, contents))

        def too_late(owing: str) -> str:
            return f"worker {owing} has not sent its part of the resident in time"

        return self._requests.ask(slots, ask, deadline, too_late)

    def answered(self, slot: int, fetched: from_worker.Fetched, body: Any) -> None:
        """A worker has answered."""
        if fetched.failure is None:
            self._requests.answered(fetched.token, slot, (fetched.rows, body))
        else:
            self._requests.refused(fetched.token, Refused(slot, fetched.failure, body))

    def fail(self, error: ColocateError) -> None:
        """No answer will come any more."""
        self._requests.fail_all(error)
