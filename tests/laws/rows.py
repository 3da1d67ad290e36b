"""A role whose methods work row by row, so that no result depends on which rank has which rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from colocate import (
    Broadcast,
    Concat,
    Dispatch,
    First,
    Gather,
    OnRank,
    PerRank,
    Ranks,
    Reduce,
    Role,
    Scatter,
    method,
)


def each(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the value with `leaf` applied to each tensor, array and list, also inside TensorDicts."""
    return whole(value, lambda item: item.apply(leaf) if isinstance(item, TensorDict) else leaf(item))


def whole(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the value with `leaf` applied to each leaf; a TensorDict is one leaf."""
    if isinstance(value, dict):
        return {key: whole(item, leaf) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(whole(item, leaf) for item in value)
    return None if value is None else leaf(value)


def doubled(leaf: Any) -> Any:
    """Return a leaf with each row twice as large."""
    if isinstance(leaf, list):
        return [[row, row] for row in leaf]
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.dtype == object else np.stack([leaf, leaf], -1)
    return ~leaf if leaf.dtype is torch.bool else leaf * 2


def viewed(leaf: Any) -> Any:
    """Return the same rows as a view of another shape, with an offset, or of repeated memory."""
    if isinstance(leaf, list):
        return leaf[:]
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(leaf[:, None], (len(leaf), 2, *leaf.shape[1:]))
    if leaf.is_nested:
        return leaf.transpose(1, 2)
    if leaf.dim() > 1:
        return leaf.transpose(0, -1).transpose(0, -1)[..., ::2]
    longer = torch.cat([leaf.new_zeros(1), leaf])
    return longer[1:, None].expand(-1, 2)


def stretched(leaf: Any, counts: Sequence[int]) -> Any:
    """Return a leaf with row i `counts[i]` times, which may be 0."""
    if isinstance(leaf, list):
        return [row for row, count in zip(leaf, counts, strict=True) for _ in range(count)]
    if isinstance(leaf, np.ndarray):
        return np.repeat(leaf, list(counts), axis=0)
    return leaf[torch.repeat_interleave(torch.tensor(list(counts), dtype=torch.int64))]


def head(leaf: Any, count: int | None) -> Any:
    """Return the first `count` rows."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_nested or count is None:
        return leaf[:count]
    jagged: Any = leaf
    offsets = jagged.offsets()[: count + 1]
    return torch.nested.nested_tensor_from_jagged(jagged.values()[: int(offsets[-1])], offsets=offsets)


def size(value: Any) -> int:
    """Return the number of rows."""
    if isinstance(value, dict | tuple):
        return max((size(item) for item in (value.values() if isinstance(value, dict) else value)), default=0)
    return 0 if value is None else len(value) if isinstance(value, list) else int(value.shape[0])


class Rotate(Dispatch):
    """A user's dispatch, which sees only values, and gives each rank all arguments and its index."""

    def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
        assert not any("reference" in repr(value) for value in arguments.values())
        return [{**arguments, "rank": rank} for rank in range(ranks.world_size)]


class Rows(Role):
    """A role for the law of residency."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.kept: list[Any] = []

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def same(self, x: Any) -> Any:
        return x

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def double(self, x: Any) -> Any:
        return each(x, doubled)

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def inference(self, x: Any) -> Any:
        with torch.inference_mode():
            return {"made": each(x, doubled), "given": x}

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def graded(self, x: Any) -> Any:
        def leaf(item: Any) -> Any:
            return item * self.weight if isinstance(item, torch.Tensor) and item.is_floating_point() else item

        return each(x, leaf)

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def view(self, x: Any) -> Any:
        return each(x, viewed)

    @method(dispatch=Scatter("x", empty="run"), collect=Concat())
    def hold(self, x: Any) -> Any:
        """Keep the result, unchanged."""
        result = (x, each(x, doubled))
        self.kept.append(result)
        return result

    @method(dispatch=Scatter("x", "y", empty="run"), collect=Concat())
    def both(self, x: Any, y: Any) -> Any:
        assert size(x) == size(y)
        return {"x": x, "y": y}

    @method(dispatch=Scatter("x", "counts", empty="run"), collect=Concat())
    def stretch(self, x: Any, counts: list[int]) -> Any:
        """Leave ranks with few rows, or none."""
        return whole(x, lambda leaf: stretched(leaf, counts))

    @method(dispatch=Scatter("x", pad=True, empty="run"), collect=Concat())
    def padded(self, x: Any) -> Any:
        return each(x, doubled)

    @method(dispatch=Scatter("x", pad="masked", empty="run"), collect=Concat())
    def masked(self, x: Any) -> Any:
        valid = self.ctx.valid_rows
        return whole(x, lambda leaf: head(leaf, valid))

    @method(dispatch=Scatter("x", balance="costs", empty="run"), collect=Concat())
    def balanced(self, x: Any, costs: list[int] | None = None) -> Any:
        assert costs is None or size(x) == len(costs)
        return each(x, doubled)

    @method(dispatch=Scatter("x", empty="run"), collect=Concat(), concurrency=2)
    async def later(self, x: Any) -> Any:
        return each(x, doubled)

    @method(dispatch=Scatter("x"), collect=Reduce("sum"))
    def count(self, x: Any) -> dict[str, Any]:
        """Count the rows; a call without rows for each rank is refused."""
        return {"rows": size(x), "tensor": torch.tensor([size(x), 1])[:1]}

    @method(collect=First())
    def first(self, x: Any) -> Any:
        return x

    @method
    def gather(self, x: Any) -> Any:
        return (self.ctx.rank, x)

    @method(collect=Concat())
    def copies(self, x: Any) -> Any:
        return x

    @method(collect=Reduce("mean"))
    def mean(self, x: Any) -> Any:
        return [torch.tensor([1.0, self.ctx.rank], requires_grad=True), np.array([self.ctx.rank, 1]), 0.5]

    @method(dispatch=PerRank("items"), collect=Gather())
    def per_rank(self, items: Any, x: Any = None) -> Any:
        return {"item": items, "x": x}

    @method(dispatch=OnRank(0))
    def on_rank(self, x: Any) -> Any:
        return each(x, doubled)

    @method(dispatch=Rotate(), collect=First())
    def rotate(self, x: Any, rank: int = -1) -> Any:
        assert rank == self.ctx.rank
        return x

    @method(dispatch=Scatter("x", empty="run"), collect=Reduce("mean"))
    def weighted_mean(self, x: list[int]) -> dict[str, Any]:
        return self._means(x)

    @method(dispatch=Scatter("x", pad="masked"), collect=Reduce("mean"))
    def masked_mean(self, x: list[int]) -> dict[str, Any]:
        return self._means(x[: self.ctx.valid_rows])

    @method(dispatch=Scatter("x"), collect=Reduce("mean", weight=None))
    def plain_mean(self, x: list[int]) -> dict[str, Any]:
        return self._means(x)

    def _means(self, x: list[int]) -> dict[str, Any]:
        mean = sum(x) / len(x) if x else float("nan")  # A rank without rows has no weight, whatever its value.
        return {"number": mean, "tensor": torch.tensor([mean], dtype=torch.float64), "array": np.array([mean])}

    @method(dispatch=Scatter("x", empty="run"), collect=Reduce("max"))
    def largest(self, x: list[int]) -> int:
        return max(x, default=-1)

    @method(dispatch=Broadcast(), collect=First())
    def forget(self) -> int:
        """Drop the results that `hold` keeps."""
        count = len(self.kept)
        self.kept.clear()
        return count
