"""Rows by what they cost: how even the parts are, and that nothing is lost on the way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from colocate import Concat, ConfigError, DispatchError, Ranks, Scatter
from colocate._values.dispatch import plan
from colocate._values.mesh import Mesh
from colocate._values.plain import even_sizes
from colocate.features.balance.parts import balanced, inverse, keeps_sets, row_costs

COSTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
PARTS = st.integers(1, 3)


def split(costs: list[int], count: int, of: int = 1) -> Any:
    """The parts, of which None stands for those that lie one after the other."""
    if (found := balanced(costs, count, of)) is not None:
        return found
    ends = itertools.accumulate(even_sizes(len(costs), count, of), initial=0)
    return [range(*rows) for rows in itertools.pairwise(ends)]


def largest(costs: list[int], parts: Any) -> int:
    return int(max(sum(costs[row] for row in part) for part in parts))


@settings(deadline=None)
@given(COSTS, PARTS)
def test_the_largest_part_is_within_the_bound_of_the_best(costs: list[int], count: int) -> None:
    """LPT's bound, 4/3 - 1/(3 count), of the best of all ways to split them."""
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
    assert keeps_sets(parts, of)
    rows = [row for part in parts for row in part]
    places = inverse(parts, [*map(len, parts)], range(count))
    assert [rows[place] for place in places] == [*range(len(costs))]
    assert largest(costs, parts) <= -(-sum(costs) // count) + of * max(costs)


def test_what_is_even_as_it_lies_stays_there() -> None:
    assert all(balanced(costs, count) is None for costs, count in (([7] * 6, 3), ([], 2), ([0] * 3, 3), ([9, 2], 1)))
    assert balanced([18, 18, 2], 2) == [[0], [1, 2]]


@pytest.mark.parametrize(
    "value",
    [
        [2, 0, 1],
        torch.tensor([2, 0, 1]),
        np.array([2, 0, 1]),
        torch.tensor([[True, True], [False, False], [False, True]]),
        np.array([[True, True], [False, False], [False, True]]),
    ],
)
def test_numbers_and_masks(value: Any) -> None:
    assert row_costs(value, "tokens") == [2, 0, 1]


@pytest.mark.parametrize(
    "value", [[1.0], "ab", 3, [[1]], {"a": [1]}, torch.ones(2), torch.ones(2, 2, dtype=torch.int64), np.ones((1, 1, 1))]
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(DispatchError, match="'tokens' says what each row costs") as caught:
        row_costs(value, "tokens")
    assert caught.value.parameter == "tokens"


def test_what_is_no_partition_of_the_rows_is_refused() -> None:
    with pytest.raises(DispatchError, match="another axis"):
        inverse([[0, 2], [0, 2]], [2, 2], [0, 1])
    with pytest.raises(DispatchError, match="rank 3 was given 1 row that"):
        inverse([[0, 2], [1]], [2, 2], [0, 3])


def test_along_an_axis_of_a_mesh() -> None:
    """The ranks of a place get the same rows, and one copy of each comes back in order."""
    ranks = Ranks(4, {"": Mesh({"dp": 2, "tp": 2})})
    arguments = {"rows": [*"abcd"], "costs": [9, 9, 1, 1]}
    planned = plan(Scatter("rows", balance="costs"), arguments, ranks)
    found = [part["rows"] for part in planned.arguments]
    assert found == [["a", "d"], ["a", "d"], ["b", "c"], ["b", "c"]]
    told = Ranks(4, ranks.meshes, rows=planned.valid, partition=planned.partition)
    assert Concat().join(found, told) == arguments["rows"]
    with pytest.raises(DispatchError, match="along another axis than that of Concat"):
        Concat("tp").join(found, told)
    with pytest.raises(ConfigError, match="padding makes parts of equally many rows"):
        Scatter("rows", balance="costs", pad=True)
