"""`Buffer`: what generates puts items into it, and what trains takes those that aren't too old."""

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
from colocate.texts import amount_problem, limit, shown

T = TypeVar("T")


@attrs.frozen(eq=False)  # found by identity: users' values are compared by their own code
class _Item(Generic[T]):
    value: T
    version: int


class Buffer(Generic[T]):
    """A bounded buffer on the driver between a stream and a trainer; its methods may be called from any thread.

    Iterating over it takes items one by one, whatever their version, until it is closed and empty.

    Attributes:
        capacity: How many items it holds; who puts more waits.
        max_staleness: By how many versions of weights an item may be older than the trainer.
    """

    def __init__(self, capacity: int, max_staleness: int = 1) -> None:
        """Make an empty buffer.

        Args:
            capacity: How many items it holds.
            max_staleness: By how many versions an item may be older than what `get` is given; 0 for none.

        Raises:
            ConfigError: One of them is no such number.
        """
        for name, value, least in (("capacity", capacity, 1), ("max_staleness", max_staleness, 0)):
            if (problem := amount_problem(value, whole=True, least=least)) is not None:
                raise ConfigError(f"Buffer({name}) {problem}")
        self.capacity, self.max_staleness = capacity, max_staleness
        self._items: deque[_Item[T]] = deque()
        self._news = threading.Condition()
        self._dropped = 0
        self._closed = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # of the error, when it came

    @property
    def dropped(self) -> int:
        """How many items were too old, and nobody has got them."""
        return self._dropped

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<buffer of {len(self)} of {self.capacity} items, {state}, {self._dropped} dropped>"

    def put(self, item: T, version: int = 0, timeout: float | None = None) -> None:
        """Add an item, as soon as there is room.

        Args:
            item: The item.
            version: The weights that it was made with (`ctx.weights_version`); of several, the oldest.
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            ConfigError: `version` is no whole number.
            ClosedError: The buffer is closed.
            TimeoutError: It is full, and nobody takes anything.
        """
        _check_version(version, "put")
        within = limit(timeout, "put(timeout)")
        with self._news:
            has_room = self._news.wait_for(lambda: self._closed or len(self._items) < self.capacity, within)
            if self._closed:
                raise ClosedError("the buffer is closed, and takes no item any more")
            if not has_room:
                raise TimeoutError(f"the buffer has been full for {timeout} s: {self.capacity} items wait for `get`")
            self._items.append(_Item(item, version))
            self._news.notify_all()

    def get(self, n: int = 1, *, version: int | None = None, timeout: float | None = None) -> list[T]:
        """Take the next items, the first that were put; what is too old is dropped, and counted in `dropped`.

        Args:
            n: How many.
            version: The trainer's weights: items of versions below `version - max_staleness` are dropped. None drops
                nothing.
            timeout: Seconds to wait for them; None for as long as it takes.

        Returns:
            The items; fewer than `n`, or none, only where the buffer is closed and has no more.

        Raises:
            ConfigError: `n` is more than the buffer holds, or `version` no whole number.
            TimeoutError: There aren't as many in time; those that there are stay.
            BaseException: The buffer was closed with this error, and has no more.
        """
        if (problem := amount_problem(n, whole=True, least=1)) is not None:
            raise ConfigError(f"get(n) {problem}")
        if n > self.capacity:
            raise ConfigError(f"get({n}): the buffer holds {self.capacity} items, so that there are never as many")
        if version is not None:
            _check_version(version, "get")
        within = limit(timeout, "get(timeout)")
        with self._news:
            if not self._news.wait_for(lambda: self._has(n, version) or self._closed, within):
                raise TimeoutError(f"{len(self._items)} of {n} items are in the buffer after {timeout} s")
            found = [self._items.popleft().value for _ in range(min(n, len(self._items)))]
            self._news.notify_all()
            if not found and self._error is not None:
                raise self._error.with_traceback(self._trace)
            return found

    def close(self, error: BaseException | None = None) -> None:
        """Have it take no item any more; what it has can be got. Who waits for room gets a `ClosedError`. Idempotent.

        Args:
            error: Why there are no more: what has ended whoever puts items in. `get` raises it when it has none left.
        """
        with self._news:
            if not self._closed and error is not None:
                self._error, self._trace = error, error.__traceback__
            self._closed = True
            self._news.notify_all()

    def __iter__(self) -> Iterator[T]:
        while found := self.get():
            yield found[0]

    def _has(self, n: int, version: int | None) -> bool:
        """Whether there are so many items, without those that are too old."""
        if version is not None:
            # One by one, each in one step: a signal's handler may put something between two of these lines.
            for old in [each for each in [*self._items] if each.version < version - self.max_staleness]:
                with contextlib.suppress(ValueError):  # the handler has taken it
                    self._items.remove(old)
                    self._dropped += 1
                self._news.notify_all()  # there is room
        return len(self._items) >= n


def _check_version(version: object, what: str) -> None:
    if not isinstance(version, numbers.Integral) or isinstance(version, bool):
        raise ConfigError(
            f"{what}(version) must be a whole number, as ctx.weights_version and WeightSync.version are, not "
            f"{shown(version)}"
        )
