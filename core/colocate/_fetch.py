"""Fetches: values of residents on their way from the workers to the driver."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from colocate._off_main import Flag
from colocate.errors import ColocateError


@attrs.define(eq=False)
class _Fetch:
    slots: list[int]
    answers: dict[int, tuple[int | None, Any]] = attrs.field(factory=dict)
    error: Exception | None = None
    done: Flag = attrs.field(factory=Flag)


class Refused(Exception):
    """A worker can't send its part: what it has told of that, and the exception as it travels."""

    def __init__(self, slot: int, told: tuple[Any, ...], body: Any) -> None:
        super().__init__(slot)
        self.slot, self.told, self.body = slot, told, body


class Fetches:
    """Asks workers for parts of residents and waits for all of them."""

    def __init__(self, ask: Callable[[int, tuple[Any, ...]], None], base: int = 0) -> None:
        """Args: ask: Sends a head to a slot's worker. base: Its numbers are above this."""
        self._ask = ask
        self._tokens = itertools.count(base + 1)
        self._pending: dict[int, _Fetch] = {}
        self._failed: ColocateError | None = None
        self._lock = threading.Lock()

    def get(self, slots: Sequence[int], key: int, contents: bool, deadline: float) -> list[tuple[int | None, Any]]:
        """The answers of some slots, in their order; each is its rows and a body.

        Args:
            slots: The slots.
            key: The resident.
            contents: Whether the parts themselves are wanted, or their structure.
            deadline: Until when it waits, by `time.monotonic()`.

        Raises:
            TimeoutError: They haven't come in time.
            Refused: A worker can't send its part.
            ColocateError: No answer will come any more.
        """
        fetch = _Fetch(list(slots))
        with self._lock:
            if self._failed is not None:
                raise self._failed.with_traceback(None)
            token = next(self._tokens)
            self._pending[token] = fetch
        try:
            for slot in slots:
                self._ask(slot, ("fetch", token, key, contents))
            if not fetch.done.wait(None if deadline == math.inf else deadline - time.monotonic()):
                late = ", ".join(str(slot) for slot in slots if slot not in fetch.answers)
                raise TimeoutError(f"worker {late} has not sent its part of the resident in time")
        finally:
            self._pending.pop(token, None)
        if fetch.error is not None:
            raise fetch.error
        return [fetch.answers[slot] for slot in slots]

    def answered(self, slot: int, head: tuple[Any, ...], body: Any) -> None:
        """A worker has answered."""
        _, token, rows, error = head
        fetch = self._pending.get(token)
        if fetch is None:
            return
        if error is not None:
            fetch.error = Refused(slot, error, body)
            fetch.done.set()
            return
        fetch.answers[slot] = rows, body
        if len(fetch.answers) == len(fetch.slots):
            fetch.done.set()

    def fail(self, error: ColocateError) -> None:
        """No answer will come any more."""
        with self._lock:
            self._failed = error
            pending = list(self._pending.values())
        for fetch in pending:
            fetch.error = error
            fetch.done.set()
