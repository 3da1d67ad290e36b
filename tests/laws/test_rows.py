"""The laws of rows through real groups: split rows are joined again, and means are weighted by rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from colocate import ColocatedGroup, DispatchError

from .layouts import EXECUTORS, parts, ranks, spawn
from .reused import Reused
from .rows import Rows
from .values import difference, values

SLOTS = {"threads": 4, "strict": 3, "processes": 2}


def any_value() -> st.SearchStrategy[Any]:
    return st.tuples(st.integers(0, 7), st.booleans()).flatmap(lambda drawn: values(*drawn))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_through_a_group(executor: str, examples: dict[str, int]) -> None:
    """The laws of dispatch and collect hold with workers in between."""
    slots = SLOTS[executor]
    with Reused(lambda stack: spawn(stack, executor, slots)) as spawned:
        for law in (what_goes_out_comes_back, a_group_does_what_a_role_object_does, means_are_weighed_by_rows):
            settings(max_examples=examples[executor])(law(spawned, slots))()


def what_goes_out_comes_back(spawned: Reused[ColocatedGroup], slots: int) -> Callable[[], None]:
    """Concat reverses Scatter; broadcast gives all ranks the whole value, and PerRank each its own item."""

    @given(st.sampled_from(list(ranks(slots))), any_value())
    def law(role: str, value: Any) -> None:
        count = ranks(slots)[role]
        with spawned() as group:
            view = group.role(role, Rows)
            same(view.same(value), value)
            same(view.first(value), value)
            same(view.gather(value), [(rank, value) for rank in range(count)])
            same(view.rotate(value), value)
            same(view.per_rank([value] * count, value), [{"item": value, "x": value}] * count)
            same(view.first.options(ranks=[count - 1])(value), value)

    return law


def a_group_does_what_a_role_object_does(spawned: Reused[ColocatedGroup], slots: int) -> Callable[[], None]:
    """Methods that work row by row give the same results on any number of ranks, with or without padding."""
    alone = Rows()
    names = ["double", "inference", "graded", "view", "padded", "masked", "later"]

    @given(st.sampled_from(list(ranks(slots))), st.sampled_from(names), any_value())
    def law(role: str, name: str, value: Any) -> None:
        with spawned() as group:
            same(getattr(group.role(role), name)(value), getattr(alone, name)(value))

    return law


def means_are_weighed_by_rows(spawned: Reused[ColocatedGroup], slots: int) -> Callable[[], None]:
    """Means are weighted by rows, with uneven parts and padding; without weights all parts count equally."""

    @given(st.sampled_from(list(ranks(slots))), st.lists(st.integers(0, 100), min_size=1, max_size=9))
    def law(role: str, x: list[int]) -> None:
        count = parts(slots)[role]
        with spawned() as group:
            view = group.role(role, Rows)
            assert_means(view.weighted_mean(x), fmean(x))
            assert_means(view.masked_mean(x), fmean(x))
            assert_means(view.weighted_mean(view.stretch.keep(x, [2, *[1] * (len(x) - 1)]).ref), fmean([x[0], *x]))
            assert view.largest(x) == max(x)
            if len(x) < count:
                with pytest.raises(DispatchError, match=f"{len(x)} rows? for {count} ranks?"):
                    view.plain_mean(x)
            else:
                assert_means(view.plain_mean(x), fmean(map(fmean, split(x, count))))

    return law


def same(found: Any, wanted: Any) -> None:
    words = difference(found, wanted)
    assert words is None, words


def assert_means(found: dict[str, Any], wanted: float) -> None:
    assert [found["number"], found["tensor"].item(), found["array"].item()] == pytest.approx([wanted] * 3, rel=1e-12)


def split(x: list[int], count: int) -> list[list[int]]:
    """Split as evenly as possible, with the larger parts first."""
    each, more = divmod(len(x), count)
    starts = [each * place + min(place, more) for place in range(count + 1)]
    return [x[start:stop] for start, stop in pairwise(starts)]
