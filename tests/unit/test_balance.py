"""Rows are split by their costs: the parts are even, and no row is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from colocate import DispatchError
from colocate._values.plain import split_evenly
from colocate.features.balance.parts import balance_rows, has_whole_sets, invert_partition

COSTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
PARTS = st.integers(1, 3)


def split(costs: list[int], count: int, of: int = 1) -> Any:
    """Return the parts, contiguous ones where `balance_rows` returns None."""
    if (found := balance_rows(costs, count, of)) is not None:
        return found
    ends = itertools.accumulate(split_evenly(len(costs), count, of), initial=0)
    return [range(*rows) for rows in itertools.pairwise(ends)]


def largest(costs: list[int], parts: Any) -> int:
    return int(max(sum(costs[row] for row in part) for part in parts))


@settings(deadline=None)
@given(COSTS, PARTS)
def test_the_largest_part_is_within_the_bound_of_the_best(costs: list[int], count: int) -> None:
    """The largest part is within LPT's bound, 4/3 - 1/(3 count), of the best split's."""
    best = min(
        max(sum(cost for cost, at in zip(costs, where, strict=True) if at == part) for part in range(count))
        for where in itertools.product(range(count), repeat=len(costs))
    )
    parts = split(costs, count)
    assert sorted(row for part in parts for row in part) == [*range(len(costs))]
    assert all([*part] == sorted(part) for part in parts)
    assert all(parts) or len(costs) < count
    assert 3 * count * largest(costs, parts) <= (4 * count - 1) * best


@settings(deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=200), st.integers(1, 9), st.sampled_from([1, 2, 3]))
def test_sets_stay_together_and_order_is_restored(costs: list[int], count: int, of: int) -> None:
    costs = [cost for cost in costs for _ in range(of)]
    parts = split(costs, count, of)
    assert has_whole_sets(parts, of)
    rows = [row for part in parts for row in part]
    places = invert_partition(parts, [*map(len, parts)], range(count))
    assert [rows[place] for place in places] == [*range(len(costs))]
    assert largest(costs, parts) <= -(-sum(costs) // count) + of * max(costs)


def test_balanced_rows_stay_in_place() -> None:
    assert all(
        balance_rows(costs, count) is None for costs, count in (([7] * 6, 3), ([], 2), ([0] * 3, 3), ([9, 2], 1))
    )
    assert balance_rows([18, 18, 2], 2) == [[0], [1, 2]]


def test_invalid_partition_is_refused() -> None:
    with pytest.raises(DispatchError, match="another axis"):
        invert_partition([[0, 2], [0, 2]], [2, 2], [0, 1])
    with pytest.raises(DispatchError, match="rank 3 was given 1 row that"):
        invert_partition([[0, 2], [1]], [2, 2], [0, 3])
