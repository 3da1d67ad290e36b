"""Which rank gets which row, of those that end one by one."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from colocate.features.rows.calls import Flow


def played(flow: Flow, times: list[float], places: int) -> tuple[float, dict[int, int]]:
    """When the last of its rows ends, where each takes so long, and on which slot each ran; all are read at once."""
    now, ends, homes = 0.0, list[tuple[float, int]](), dict[int, int]()
    while True:
        for slot, row in flow.give():
            homes[row] = slot
            heapq.heappush(ends, (now + times[row], row))
        assert max(Counter(flow.running.values()).values(), default=0) <= places
        if not ends:
            assert not flow.waits
            return now, homes
        now, row = heapq.heappop(ends)
        flow.ended(row)
        flow.read()


def simulated(times: list[float], places: int) -> float:
    """When the last row ends, where the first place that is free takes the next row."""
    free = [0.0] * places
    for each in times:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_free_place_takes_the_next_row(seed: int) -> None:
    """Whatever rows take, and slots there are; and also with keys each row runs once, each key on one slot."""
    draw = random.Random(seed)
    slots, places = draw.randint(1, 4), draw.randint(1, 8)
    times = [draw.uniform(0.01, 1.0) for _ in range(draw.randint(1, 100))]
    last, _ = played(Flow(range(len(times)), range(slots), places), times, places)
    assert last == pytest.approx(simulated(times, slots * places))
    ahead = draw.randint(slots * places, 3 * slots * places)
    assert played(Flow(range(len(times)), range(slots), places, ahead), times, places)[0] == pytest.approx(last)
    keys = {row: draw.randint(0, 5) for row in range(len(times))}
    _, homes = played(Flow(range(len(times)), range(slots), places, keys=keys), times, places)
    assert len(homes) == len(times)
    assert len({(keys[row], slot) for row, slot in homes.items()}) == len(set(keys.values()))


def test_the_least_loaded_one_comes_first() -> None:
    """Rows are spread from the beginning."""
    flow = Flow(range(6), [4, 7], 2)
    assert flow.give() == [(4, 0), (7, 1), (4, 2), (7, 3)]
    flow.ended(1)
    assert flow.give() == [(7, 4)]


def test_rows_leave_a_slot_on_which_they_fail() -> None:
    """Others take them, with all rows of their keys, until one has ended there otherwise; or there is no other slot."""
    flow = Flow(range(20), [0, 1], 1, keys={row: row % 2 for row in range(20)})
    assert flow.give() == [(0, 0), (1, 1)]
    flow.ended(0, is_bereft=True)
    assert flow.give() == []
    flow.ended(1)
    assert flow.give() == [(1, 2)]
    flow.ended(2, is_bereft=True)
    assert flow.give() == [(0, 3), (1, 4)]  # no slot can run them: each says so
    flow.ended(3)
    flow.ended(4, is_bereft=True)
    homes = {}
    while given := flow.give():
        homes |= {row: slot for slot, row in given}
        flow.ended(given[0][1])
    assert homes == dict.fromkeys(range(5, 20), 0)

    tries = {0: 3, 1: 1, 2: 1}
    flow = Flow(range(3), [0, 1], 1, tries=tries)
    assert flow.give() == [(0, 0), (1, 1)]
    flow.ended(0, again=True, is_bereft=True)
    assert flow.give() == []
    flow.ended(1, is_bereft=True)
    assert sorted(flow.give()) == [(0, 0), (1, 2)]
    flow.ended(2)
    assert flow.give() == []
    flow.ended(0, again=True, is_bereft=True)
    assert flow.give() == [(1, 0)]
