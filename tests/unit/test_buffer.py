"""A `Buffer` loses no item, gives none twice or too stale, and blocks the faster side."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, strategies as st

from colocate import ClosedError, ConfigError
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_rollout import Buffer


def put_all(buffer: Buffer[Any], items: Iterable[Any], version: int = 0) -> None:
    for item in items:
        buffer.put(item, version)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3)),
        st.tuples(st.just("get"), st.integers(1, 3)),
        st.tuples(st.just("sync"), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(3, 5), st.integers(0, 2))
def test_get_returns_requested_fresh_items(steps: list[tuple[str, int]], capacity: int, staleness: int) -> None:
    """`get` returns as many items as requested, in order and none too stale; all others are counted or buffered."""
    buffer: Buffer[tuple[int, int]] = Buffer(capacity, staleness)
    there: list[tuple[int, int]] = []
    version = put = taken = 0
    for what, number in steps:
        if what == "sync":
            version += 1
        elif what == "put" and len(there) == capacity:
            with pytest.raises(TimeoutError, match="full"):
                buffer.put((put, version), version, timeout=0)
        elif what == "put":
            made = max(0, version - number)
            buffer.put((put, made), made)
            there.append((put, made))
            put += 1
        else:
            there = [item for item in there if item[1] >= version - staleness]
            if len(there) < number:
                with pytest.raises(TimeoutError, match=f"{len(there)} of {number} items"):
                    buffer.get(number, version=version, timeout=0)
            else:
                assert buffer.get(number, version=version) == there[:number]
                there = there[number:]
                taken += number
        assert len(buffer) == len(there) <= capacity
        assert taken + buffer.dropped + len(buffer) == put
    buffer.close()
    assert [*buffer] == there


def test_threads() -> None:
    """Concurrent producers and consumers exchange each item exactly once."""
    buffer: Buffer[int] = Buffer(3)
    with ThreadPoolExecutor() as pool:
        takes = [pool.submit(lambda: [*buffer]) for _ in range(3)]
        puts = [pool.submit(put_all, buffer, range(first, first + 200)) for first in (0, 200, 400)]
        for each in puts:
            each.result(PATIENCE_S)
        buffer.close()
        assert sorted(item for each in takes for item in each.result(PATIENCE_S)) == [*range(600)]


def test_dropped_stale_items_make_room() -> None:
    """A `put` that waits for room continues when stale items are dropped, and `get` returns the new items."""
    buffer: Buffer[str] = Buffer(2, max_staleness=0)
    buffer.put("old", 0)
    buffer.put("older", 0)
    with ThreadPoolExecutor() as pool:
        puts = pool.submit(put_all, buffer, ("new", "newer"), 1)
        assert buffer.get(2, version=1, timeout=PATIENCE_S) == ["new", "newer"]
        puts.result(PATIENCE_S)
    assert (buffer.dropped, len(buffer)) == (2, 0)


def test_the_end() -> None:
    """A closed buffer gives its last items, then nothing or its error; a `put` that waits for room raises."""
    buffer: Buffer[int] = Buffer(1)
    buffer.put(1)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(buffer.put, 2)
        wait_until(lambda: threading.active_count() > 1, "it waits")
        buffer.close(ValueError("the generator has failed"))
        buffer.close()
        assert isinstance(waits.exception(PATIENCE_S), ClosedError)
    assert buffer.get() == [1]
    for _ in range(2):
        with pytest.raises(ValueError, match="the generator has failed"):
            buffer.get()
    assert "of 1 items, closed" in repr(buffer)
    waiting: Buffer[int] = Buffer(2)
    with ThreadPoolExecutor() as pool:
        some = pool.submit(waiting.get, 2)
        waiting.put(1)
        waiting.close()
        assert some.result(PATIENCE_S) == [1]
    assert waiting.get() == []


def test_repeated_errors_keep_one_traceback() -> None:
    """Each `get` from a failed buffer raises the error with the same traceback, which ends where the error arose."""
    buffer: Buffer[int] = Buffer(1)
    try:
        raise ValueError("the generator has failed")
    except ValueError as error:
        buffer.close(error)
    told = []
    for _ in range(3):
        with pytest.raises(ValueError, match="the generator has failed") as caught:
            buffer.get()
        told.append([line.name for line in traceback.extract_tb(caught.value.__traceback__)])
    assert told[0][-1] == "test_repeated_errors_keep_one_traceback"
    assert told[0] == told[1] == told[2]


def test_putting_amid_getting() -> None:
    """An item that is put while `get` drops stale ones, as by a signal handler, isn't lost."""

    class Interrupted(int):
        def __lt__(self, other: int) -> bool:
            if len(buffer) < 3:
                buffer.put("by the handler", 2)
            return int(self) < other

    buffer: Buffer[str] = Buffer(3, max_staleness=0)
    buffer.put("old", Interrupted(0))
    buffer.put("new", Interrupted(2))
    assert buffer.get(2, version=2) == ["new", "by the handler"]
    assert (buffer.dropped, len(buffer)) == (1, 0)


def test_bad_input() -> None:
    for wrong in ({"capacity": 0}, {"capacity": 2.5}, {"capacity": 1, "max_staleness": -1}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            Buffer(**wrong)
    buffer: Buffer[int] = Buffer(2)
    with pytest.raises(ConfigError, match=r"get\(3\): the buffer holds 2 items"):
        buffer.get(3)
    with pytest.raises(ConfigError, match="must be a whole number from 1"):
        buffer.get(0)
    with pytest.raises(ConfigError, match="timeout"):
        buffer.put(1, timeout=-1)
    for wrong_version in ("v1", 0.5, None, True):
        with pytest.raises(ConfigError, match=r"put\(version\) must be a whole number"):
            buffer.put(1, wrong_version)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"get\(version\) must be a whole number"):
        buffer.get(version=0.5)  # type: ignore[arg-type]
    assert len(buffer) == 0
