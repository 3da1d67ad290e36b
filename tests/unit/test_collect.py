"""Collect makes one value of the results: each part of the work counts once, weighted by its rows."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from colocate._values.collect import Concat, First, Gather, Reduce, check_collect
from colocate._values.dispatch import Broadcast, Scatter
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import DispatchError


def test_results_of_some_ranks() -> None:
    """Each collect matches the results of a call on some ranks with these ranks."""
    ranks = Ranks(8, {"": Mesh({"dp": 4, "tp": 2})}, targets=[6, 3, 2])
    assert Gather().join(["g", "d", "c"], ranks) == ["g", "d", "c"]
    assert Concat().join([["g"], ["d"], ["c"]], ranks) == ["c", "g"]
    assert First().join(["g", "d", "c"], ranks) == "c"
    assert Reduce("sum").join([100, 10, 1], ranks) == 101
    weighted = attrs.evolve(ranks, rows=[3, 9, 1])
    assert Reduce("mean").join([4, 10, 8], weighted) == 5
    assert First().join(["x"], Ranks(2, {"a": Mesh({"dp": 2}), "b": Mesh({"tp": 2})}, targets=[1])) == "x"


def test_padding_is_trimmed_or_the_rank_is_named() -> None:
    ranks = Ranks(3, rows=[2, 1, 0], padded=[2, 2, 2])
    results = [torch.tensor([1, 2]), torch.tensor([3, 3]), torch.tensor([3, 3])]
    assert Concat().join(results, ranks).tolist() == [1, 2, 3]
    with pytest.raises(DispatchError, match="rank 1 was given 2 rows, padding included, and returned 1") as caught:
        Concat().join([results[0], results[1][:1], results[2]], ranks)
    assert caught.value.rank == 1


def test_results_without_rows() -> None:
    """Results of ranks without rows are ignored, as their shape is often another one.

    A reduction of such results only is refused.
    """
    results = [torch.ones(2, 4, dtype=torch.int64), torch.ones(0), torch.ones(1, 4, dtype=torch.int64)]
    assert Concat().join(results, Ranks(3)).shape == (3, 4)
    assert Concat().join([[], []], Ranks(2)) == []
    for world, rows in ((1, [0]), (2, [0, 0])):
        with pytest.raises(DispatchError, match="no rank worked on any rows"):
            Reduce("sum").join([1] * world, Ranks(world, rows=rows))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([[1], 0.5], "Concat can't join what rank 1 returned: result (float) has no rows"),
        ([[1], None], "what rank 1 returned: result is None"),
        ([{"a": [1], "loss": 0.5}] * 2, "what rank 0 returned: result['loss'] (float) has no rows"),
        ([{"a": [1]}, {"b": [1]}], "rank 0 has the keys ['a'] and rank 1 has the keys ['b']"),
    ],
)
def test_results_that_cannot_be_joined(results: list[Any], message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        Concat().join(results, Ranks(2))
    assert message in str(caught.value)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_result_type_is_independent_of_rank_count(world: int) -> None:
    """A reduction's result has the same type on one rank as on many."""
    ranks = Ranks(world)

    def all_ranks(operation: Any, value: Any) -> Any:
        return Reduce(operation).join([value] * world, ranks)

    assert isinstance(all_ranks("mean", 3), float)
    assert all_ranks("mean", True) == 1.0
    assert isinstance(all_ranks("max", True), bool)
    assert isinstance(all_ranks("mean", np.float32(0.5)), np.floating)
    assert all_ranks("mean", torch.tensor([1, 2])).dtype == torch.float32
    assert all_ranks("mean", torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all_ranks("max", torch.tensor([1, 2])).dtype == torch.int64
    assert all_ranks("mean", np.arange(2)).dtype == np.float64
    assert all_ranks("mean", np.ones(2, np.float16)).dtype == np.float16
    assert all_ranks("sum", np.array([True])).tolist() == [world]
    assert not all_ranks("mean", torch.ones(1, requires_grad=True)).requires_grad
    for wrong in ("text", {"a": object()}, torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)):
        with pytest.raises(DispatchError, match="can be reduced"):
            all_ranks("mean", wrong)


def test_nan_stays_nan() -> None:
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        for operation in ("max", "min", "sum", "mean"):
            for kind in (float, np.array, torch.tensor):
                found = Reduce(operation).join([kind(value) for value in values], Ranks(2))
                assert math.isnan(found), (operation, kind)


def test_halves_are_added_up_in_full() -> None:
    values = [torch.full((1,), 1.0, dtype=torch.bfloat16)] * 300
    assert Reduce("mean").join(values, Ranks(300)).item() == 1.0
    assert Reduce("sum").join(values, Ranks(300)).item() == 300.0
    halves = [np.full(1, 0.1, np.float16)] * 300
    assert Reduce("sum").join(halves, Ranks(300)).item() == np.float16(300 * np.float16(0.1))


@pytest.mark.parametrize("value", [np.float16(1000), np.uint8(200), np.int8(-100)])
def test_a_mean_of_numpys_numbers_does_not_overflow(value: Any) -> None:
    """A mean of small number types is right even if its row counts exceed their range."""
    found = Reduce("mean").join([value] * 2, Ranks(2, rows=[100_000, 100_001]))
    assert found == value
    assert isinstance(found, np.floating)


def test_a_sum_of_whole_numbers_does_not_overflow() -> None:
    """A sum has the largest type of its kind, as torch's and NumPy's own sums have, on one rank, too."""
    for value in (np.uint8(200), torch.tensor(200, dtype=torch.uint8), np.array(200, dtype=np.uint8)):
        for world in (1, 2):
            found = Reduce("sum").join([value] * world, Ranks(world))
            assert found == 200 * world
            assert found.dtype.itemsize == 8
    mixed = [np.array([100], np.uint8), np.array([-100], np.int8)]
    assert Reduce("sum").join(mixed, Ranks(2)).dtype == np.int64


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([{"a": 1}, {"b": 1}], "rank 0 has the keys ['a'] and rank 1 has the keys ['b']"),
        ([[1], [1, 2]], "rank 0 has a list of 1 items and rank 1 has one of 2"),
        ([{"a": None}, {"a": 1}], "['a']: that of rank 0 is None and that of rank 1 is not"),
        ([1, None], "rank 1 has None, where rank 0 has a int"),
        ([torch.ones(2), torch.ones(1)], "the shapes are (2,) on rank 0 and (1,) on rank 1"),
        ([np.array(["a"]), np.array(["b"])], "no max can be made of ndarray"),
    ],
)
def test_results_that_cannot_be_reduced(results: list[Any], message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        Reduce("max").join(results, Ranks(2))
    assert message in str(caught.value)


def test_reduction_does_not_modify_results() -> None:
    for make in (torch.ones, np.ones):
        results = [make(2), make(2) * 2]
        for operation in ("mean", "sum", "max", "min"):
            Reduce(operation).join(results, Ranks(2))
        assert [result.tolist() for result in results] == [[1, 1], [2, 2]]


def test_classes_in_place_of_values() -> None:
    with pytest.raises(DispatchError, match=r"is no Dispatch; write dispatch=Scatter\(\.\.\.\)"):
        check_collect(Scatter, Gather(), "Actor.update")
    with pytest.raises(DispatchError, match=r"is no Collect; write collect=a Collect"):
        check_collect(Broadcast(), "mean", "Actor.update")
