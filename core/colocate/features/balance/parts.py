"""Partitions rows over ranks into parts of nearly equal total cost."""

from __future__ import annotations

import heapq
import numbers
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from colocate._system.imported import find_imported
from colocate._system.numbers import format_count
from colocate._values.batch import AlignedRows, check_same_rows, check_sets, count_rows, is_deferred, take_leaf
from colocate._values.dispatch import Arguments, Scatter, use_placeholders
from colocate._values.kinds import Memo
from colocate._values.leaves import split_structure
from colocate._values.plain import Partition, split_evenly
from colocate.errors import DispatchError


def choose_partition(value: Any, name: str, count: int, of: int) -> Partition | None:
    """Partition rows into `count` parts of nearly equal cost; return None if contiguous parts are as good."""
    costs = read_row_costs(value, name)
    check_sets(f"the parameter {name!r}", len(costs), of, name)
    return balance_rows(costs, count, of)


def read_row_costs(value: Any, parameter: str) -> list[int]:
    """Return the cost of each row, which is a given whole number or the number of true values in the mask's row.

    Raises:
        DispatchError: The value is neither whole numbers from 0 up nor a mask.
    """
    numpy, torch = find_imported("numpy"), find_imported("torch")
    costs: Any = value
    if (torch is not None and isinstance(value, torch.Tensor) and not value.is_nested) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    ):
        costs = (value.sum(1) if value.ndim == 2 and str(value.dtype).endswith("bool") else value).tolist()
    numbers_only = isinstance(costs, list) and all(issubclass(kind, numbers.Integral) for kind in {*map(type, costs)})
    if not numbers_only or min(costs, default=0) < 0:
        shape = f" of shape {tuple(value.shape)} and {value.dtype}" if hasattr(value, "dtype") else ""
        raise DispatchError(
            f"the parameter {parameter!r} says what each row costs, so it has to be whole numbers from 0 up, one for "
            f"each row (a list, or a tensor or array of one axis), or a boolean mask of two axes, not a "
            f"{type(value).__name__}{shape}",
            parameter=parameter,
        )
    return costs if {*map(type, costs)} <= {int} else list(map(int, costs))


def balance_rows(costs: Sequence[int], count: int, of: int = 1) -> Partition | None:
    """Return `count` parts of the rows with nearly equal cost. Each set of `of` consecutive rows stays together.

    This is the largest differencing method (Karmarkar and Karp 1982): its largest part is at most 4/3 - 1/(3 count)
    times as large as the optimum's. Return None if contiguous parts of as many rows (`split_evenly`) are as good.
    """
    if count == 1:
        return None
    sets = [sum(costs[start : start + of]) for start in range(0, len(costs), of)]
    # Each set costs at least 1 after scaling, so that sets without a cost are spread, too.
    # The sum of these additions (1 per set) is less than one unit of the original cost.
    scale = 4 * count * len(sets) + 1
    # The heap holds partial partitions, each with the cost and sets of every part, the largest part first.
    # The least even partition is popped first.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, set_cost in enumerate(sets):
        cost = set_cost * scale + 1
        heap.append((-cost, index, [(cost, [index]), *[(0, [])] * (count - 1)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, mine = heapq.heappop(heap)
        _, _, theirs = heapq.heappop(heap)
        pairs = zip(mine, reversed(theirs), strict=True)
        joined = sorted(((a + b, x + y) for (a, x), (b, y) in pairs), key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    parts = sorted(sorted(part) for _, part in heap[0][2]) if heap else []
    ends = accumulate(split_evenly(len(sets), count), initial=0)
    largest = max((sum(sets[index_of_set] for index_of_set in part) for part in parts), default=0)
    if all(sum(sets[start:stop]) <= largest for start, stop in pairwise(ends)):
        return None
    return [
        [row for index_of_set in part for row in range(index_of_set * of, index_of_set * of + of)] for part in parts
    ]


def pick_parts(scatter: Scatter, values: Arguments, by: str, partition: Partition) -> list[dict[str, Any]]:
    """Return the parts of all arguments for a partition of rows, which was made from the parameter `by`."""
    total, count, memo = sum(map(len, partition)), len(partition), Memo()
    if scatter.empty == "error" and not all(partition):
        raise scatter.make_skipped_error(by, total, count)
    parts: list[dict[str, Any]] = [{} for _ in partition]
    for name, value in values.items():
        if (length := count_rows(value, name)) is not None:
            check_same_rows(by, total, name, length)
        beside = AlignedRows(by, total, name)

        def parts_of(leaf: Any, beside: AlignedRows = beside) -> Sequence[Any]:
            if not is_deferred(type(leaf)):
                leaf = use_placeholders(leaf) if isinstance(leaf, list) else leaf
                return [take_leaf(leaf, rows, memo) for rows in partition]
            owned = leaf.own(scatter.axis, scatter.mesh, count, scatter.rows_of, partition)
            return [leaf.pick(rows, beside) for rows in partition] if owned is None else [owned] * count

        for part, rows in zip(parts, split_structure(value, count, parts_of), strict=True):
            part[name] = rows
    return parts


def has_whole_sets(partition: Partition, of: int) -> bool:
    """Return whether each set of `of` consecutive rows is in one part, in order."""
    return all(
        len(part) % of == 0
        and all(
            part[start] % of == 0 and [*part[start : start + of]] == [*range(part[start], part[start] + of)]
            for start in range(0, len(part), of)
        )
        for part in partition
    )


def check_aligned(rows: Sequence[int], size: int, rank: int) -> None:
    """Raise a `DispatchError` unless a rank has returned one row for each given row."""
    if len(rows) != size:
        raise DispatchError(
            f"rank {rank} was given {format_count(len(rows), 'row')} that were chosen by what they cost, and returned "
            f"{size}, so nobody can put them back in order; return one row for each row given, or collect with Gather",
            rank=rank,
        )


def invert_partition(partition: Partition, sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the position of each original row in the concatenated parts.

    Args:
        partition: The original rows of each part.
        sizes: The number of rows that each rank returned.
        ranks: The rank of each part.

    Raises:
        DispatchError: A part has another number of rows than it was given, or the parts together aren't the whole.
    """
    for part, size, rank in zip(partition, sizes, ranks, strict=True):
        check_aligned(part, size, rank)
    rows = [row for part in partition for row in part]
    places = sorted(range(len(rows)), key=rows.__getitem__)
    if [rows[place] for place in places] != [*range(len(rows))]:
        raise DispatchError(
            "the rows were balanced along another axis than that of Concat, so they can't be put back in order; use "
            "the same axis in both"
        )
    return places
