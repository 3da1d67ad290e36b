"""`Buffer` passes items from a role that generates to a role that trains, and limits the items' staleness."""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

import attrs

from colocate import ClosedError, ConfigError
from colocate.texts import find_amount_problem, format_value, parse_limit

T = TypeVar("T")


@attrs.frozen(eq=False)  # Compare by identity, because users' values may define equality.
class _Item(Generic[T]):
    value: T
    version: int


class Buffer(Generic[T]):
    """A bounded buffer on the driver between a stream of items and a trainer. All methods are thread-safe.

    Iteration takes items one by one, whatever their version, until the buffer is closed and empty.

    Attributes:
        capacity: The number of items that fit; `put` waits for room.
        max_staleness: By how many versions of weights an item may be older than the trainer.
    """

    def __init__(self, capacity: int, max_staleness: int = 1) -> None:
        """Make an empty buffer.

        Args:
            capacity: The number of items that fit.
            max_staleness: By how many versions an item may be older than the `version` of `get`; 0 for none.

        Raises:
            ConfigError: An argument is no whole number, or too small.
        """
        for name, value, least in (("capacity", capacity, 1), ("max_staleness", max_staleness, 0)):
            if (problem := find_amount_problem(value, whole=True, least=least)) is not None:
                raise ConfigError(f"Buffer({name}) {problem}")
        self.capacity, self.max_staleness = capacity, max_staleness
        self._items: deque[_Item[T]] = deque()
        self._news = threading.Condition()
        self._dropped = 0
        self._closed = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # The traceback that `_error` had when `close` was called.

    @property
    def dropped(self) -> int:
        """The number of dropped items, which were too old."""
        return self._dropped

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<buffer of {len(self)} of {self.capacity} items, {state}, {self._dropped} dropped>"

    def put(self, item: T, version: int = 0, timeout: float | None = None) -> None:
        """Add an item; wait for room if the buffer is full.

        Args:
            item: The item.
            version: The version of the weights that made the item (`ctx.weights_version`); of several, the oldest.
            timeout: Seconds to wait; None for no limit.

        Raises:
            ConfigError: `version` is no whole number.
            ClosedError: The buffer is closed.
            TimeoutError: The buffer is full, and no item was taken in time.
        """
        _check_version(version, "put")
        within = parse_limit(timeout, "put(timeout)")
        with self._news:
            has_room = self._news.wait_for(lambda: self._closed or len(self._items) < self.capacity, within)
            if self._closed:
                raise ClosedError("the buffer is closed, and takes no item any more")
            if not has_room:
                raise TimeoutError(f"the buffer has been full for {timeout} s: {self.capacity} items wait for `get`")
            self._items.append(_Item(item, version))
            self._news.notify_all()

    def get(self, n: int = 1, *, version: int | None = None, timeout: float | None = None) -> list[T]:
        """Remove and return the oldest items; drop and count items that are too stale.

        Args:
            n: Number of items.
            version: The version of the trainer's weights: items of versions below `version - max_staleness` are
                dropped. None drops nothing.
            timeout: Seconds to wait for the items; None for no limit.

        Returns:
            The items; fewer than `n`, or none, only if the buffer is closed and has no more.

        Raises:
            ConfigError: `n` is more than the capacity, or `version` no whole number.
            TimeoutError: Too few items came in time; the present ones stay.
            BaseException: The buffer was closed with this error, and has no more.
        """
        if (problem := find_amount_problem(n, whole=True, least=1)) is not None:
            raise ConfigError(f"get(n) {problem}")
        if n > self.capacity:
            raise ConfigError(f"get({n}): the buffer holds {self.capacity} items, so that there are never as many")
        if version is not None:
            _check_version(version, "get")
        within = parse_limit(timeout, "get(timeout)")
        with self._news:
            if not self._news.wait_for(lambda: self._has_items(n, version) or self._closed, within):
                raise TimeoutError(f"{len(self._items)} of {n} items are in the buffer after {timeout} s")
            values = [self._items.popleft().value for _ in range(min(n, len(self._items)))]
            self._news.notify_all()
            if not values and self._error is not None:
                raise self._error.with_traceback(self._trace)
            return values

    def close(self, error: BaseException | None = None) -> None:
        """Close the buffer for new items. A waiting `put` raises a `ClosedError`; `get` returns the remaining items.

        Args:
            error: The error that ended the producer, if any. `get` raises the error once no items are left.
        """
        with self._news:
            if not self._closed and error is not None:
                self._error, self._trace = error, error.__traceback__
            self._closed = True
            self._news.notify_all()

    def __iter__(self) -> Iterator[T]:
        while items := self.get():
            yield items[0]

    def _has_items(self, n: int, version: int | None) -> bool:
        """Drop items that are too stale; return whether at least `n` items are left."""
        if version is not None:
            # Remove items one by one, because a signal handler may change the buffer between any two of these lines.
            for old in [item for item in [*self._items] if item.version < version - self.max_staleness]:
                with contextlib.suppress(ValueError):  # A signal handler may have taken the item.
                    self._items.remove(old)
                    self._dropped += 1
                self._news.notify_all()  # Wake up a `put` that waits for room.
        return len(self._items) >= n


def _check_version(version: object, what: str) -> None:
    if not isinstance(version, numbers.Integral) or isinstance(version, bool):
        raise ConfigError(
            f"{what}(version) must be a whole number, as ctx.weights_version and WeightSync.version are, not "
            f"{format_value(version)}"
        )
