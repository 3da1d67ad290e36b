"""A flow of rows decides which slot runs which row, as earlier ones end."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from colocate.features.rows.calls import RowFlow


def played(flow: RowFlow, times: list[float], places: int) -> tuple[float, dict[int, int]]:
    """Return when the last row ends, and on which slot each has run; each row is read at once."""
    now, ends, homes = 0.0, list[tuple[float, int]](), dict[int, int]()
    while True:
        for slot, row in flow.assign_rows():
            homes[row] = slot
            heapq.heappush(ends, (now + times[row], row))
        assert max(Counter(flow.running.values()).values(), default=0) <= places
        if not ends:
            assert not flow.has_waiting
            return now, homes
        now, row = heapq.heappop(ends)
        flow.on_row_ended(row)
        flow.on_row_read()


def simulated(times: list[float], places: int) -> float:
    """Return when the last row ends if the first free place takes the next row."""
    free = [0.0] * places
    for each in times:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_free_place_takes_the_next_row(seed: int) -> None:
    """Rows end as if the first free place took the next one; with keys, all rows run, each key on one slot."""
    draw = random.Random(seed)
    slots, places = draw.randint(1, 4), draw.randint(1, 8)
    times = [draw.uniform(0.01, 1.0) for _ in range(draw.randint(1, 100))]
    last, _ = played(RowFlow(range(len(times)), range(slots), places), times, places)
    assert last == pytest.approx(simulated(times, slots * places))
    ahead = draw.randint(slots * places, 3 * slots * places)
    assert played(RowFlow(range(len(times)), range(slots), places, ahead), times, places)[0] == pytest.approx(last)
    keys = {row: draw.randint(0, 5) for row in range(len(times))}
    _, homes = played(RowFlow(range(len(times)), range(slots), places, keys=keys), times, places)
    assert len(homes) == len(times)
    assert len({(keys[row], slot) for row, slot in homes.items()}) == len(set(keys.values()))


def test_the_least_loaded_one_comes_first() -> None:
    """The first rows are spread over the slots, and the slot with a free place gets the next one."""
    flow = RowFlow(range(6), [4, 7], 2)
    assert flow.assign_rows() == [(4, 0), (7, 1), (4, 2), (7, 3)]
    flow.on_row_ended(1)
    assert flow.assign_rows() == [(7, 4)]


def test_rows_avoid_failing_slot() -> None:
    """A slot on which a row fails gets none until a row ends there otherwise, or all slots have failed rows."""
    flow = RowFlow(range(20), [0, 1], 1, keys={row: row % 2 for row in range(20)})
    assert flow.assign_rows() == [(0, 0), (1, 1)]
    flow.on_row_ended(0, is_bereft=True)
    assert flow.assign_rows() == []
    flow.on_row_ended(1)
    assert flow.assign_rows() == [(1, 2)]
    flow.on_row_ended(2, is_bereft=True)
    assert flow.assign_rows() == [(0, 3), (1, 4)]  # Both slots have failed rows, so both get one.
    flow.on_row_ended(3)
    flow.on_row_ended(4, is_bereft=True)
    homes = {}
    while given := flow.assign_rows():
        homes |= {row: slot for slot, row in given}
        flow.on_row_ended(given[0][1])
    assert homes == dict.fromkeys(range(5, 20), 0)

    tries = {0: 3, 1: 1, 2: 1}
    flow = RowFlow(range(3), [0, 1], 1, tries=tries)
    assert flow.assign_rows() == [(0, 0), (1, 1)]
    flow.on_row_ended(0, again=True, is_bereft=True)
    assert flow.assign_rows() == []
    flow.on_row_ended(1, is_bereft=True)
    assert sorted(flow.assign_rows()) == [(0, 0), (1, 2)]
    flow.on_row_ended(2)
    assert flow.assign_rows() == []
    flow.on_row_ended(0, again=True, is_bereft=True)
    assert flow.assign_rows() == [(1, 0)]
