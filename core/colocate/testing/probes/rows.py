"""Roles on rows, with every dispatch and collect, with meshes, and with a user's own dispatch and collect."""

from __future__ import annotations

from typing import Any

import attrs

import colocate
from colocate import Broadcast, Concat, First, Gather, OnRank, PerRank, Reduce, Role, Scatter, method


class Rows(Role):
    """A role with methods for every dispatch and collect, on lists of numbers."""

    @method(dispatch=Scatter("batch"), collect=Concat())
    def double(self, batch: list[int]) -> list[int]:
        return [2 * row for row in batch]

    @method(dispatch=Scatter("batch"), collect=Gather())
    def seen(self, batch: Any, factor: int = 1) -> Any:
        return batch, factor

    @method(dispatch=Scatter("left", "right"), collect=Concat())
    def zipped(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        return list(zip(left, right, strict=True))

    @method(dispatch=Scatter("batch", pad=True), collect=Concat())
    def padded(self, batch: list[int]) -> list[tuple[int, int]]:
        return [(row, len(batch)) for row in batch]

    @method(dispatch=Scatter("batch", pad="masked"), collect=Gather())
    def masked(self, batch: list[int]) -> tuple[list[int], int | None]:
        """Return the padded rows of each rank, and how many of these rows aren't padding."""
        return batch, self.ctx.valid_rows

    @method(dispatch=Scatter("batch", empty="run"), collect=Gather())
    def maybe_empty(self, batch: list[int]) -> tuple[list[int], int | None]:
        return batch, self.ctx.valid_rows

    @method(dispatch=Scatter("batch", empty="run"), collect=Concat())
    def keep_rows(self, batch: list[int]) -> list[int]:
        return list(batch)

    @method(dispatch=PerRank("item"), collect=Gather())
    def each(self, item: Any, shared: Any = None) -> tuple[int, Any, Any]:
        return self.ctx.rank, item, shared

    @method(dispatch=OnRank(1))
    def on_one(self, value: Any) -> tuple[int, Any]:
        return self.ctx.rank, value

    @method(dispatch=Scatter("batch", empty="run"), collect=Reduce("mean"))
    def mean(self, batch: list[float]) -> dict[str, float]:
        """Return the mean of the rows, or NaN on a rank without rows, which isn't counted."""
        return {"mean": sum(batch) / len(batch) if batch else float("nan")}

    @method(dispatch=Scatter("batch"), collect=Reduce("mean", weight=None))
    def unweighted(self, batch: list[float]) -> float:
        return sum(batch) / len(batch)

    @method(dispatch=Scatter("batch"), collect=Reduce("sum"))
    def total(self, batch: list[int]) -> dict[str, int]:
        return {"sum": sum(batch), "count": len(batch)}

    @method(collect=Reduce("max"))
    def highest(self) -> int:
        return self.ctx.rank

    @method(collect=Reduce("min"))
    def lowest(self) -> int:
        return self.ctx.rank

    @method(dispatch=Broadcast(), collect=Concat())
    def produce(self, count: int) -> list[int]:
        return [100 * self.ctx.rank + index for index in range(count)]

    @method(dispatch=PerRank("count"), collect=Concat())
    def produce_each(self, count: int) -> list[int]:
        return [100 * self.ctx.rank + index for index in range(count)]

    @method(collect=Concat())
    def no_rows(self) -> int:
        return self.ctx.rank


class Axes(Role):
    """A role that reports the ranks' positions in a mesh, and the rows that each rank receives."""

    @method
    def coordinates(self, *axes: str) -> list[tuple[int, int]]:
        return [(self.ctx.mesh.rank(axis), self.ctx.mesh.size(axis)) for axis in axes]

    @method(dispatch=Scatter("batch"), collect=Gather())
    def seen(self, batch: list[int]) -> list[int]:
        """Return the rows that each rank receives from a batch that is split along dp."""
        return batch

    @method(dispatch=Scatter("batch"), collect=Concat())
    def tagged(self, batch: list[int]) -> list[tuple[int, int]]:
        return [(row, self.ctx.rank) for row in batch]

    @method
    def echo(self, value: Any) -> Any:
        return value

    @method(dispatch=Scatter("batch"), collect=Concat())
    def doubled(self, batch: list[int]) -> list[int]:
        return [2 * row for row in batch]

    @method(dispatch=Scatter("batch"), collect=Reduce("sum"))
    def count(self, batch: list[int]) -> int:
        return len(batch)

    @method(dispatch=Scatter("batch"), collect=First())
    def first_rank(self, batch: list[int]) -> int:
        return self.ctx.rank


@attrs.frozen
class Swap(colocate.Dispatch):
    """A user's own dispatch, which sets the argument `to` on each rank to the rank counted from the end."""

    def split(self, arguments: Any, ranks: colocate.Ranks) -> list[dict[str, Any]]:
        return [{**arguments, "to": ranks.world_size - 1 - rank} for rank in range(ranks.world_size)]


@attrs.frozen
class ByRank(colocate.Collect):
    """A user's own collect, which joins the results in a dict by rank."""

    def join(self, results: Any, ranks: colocate.Ranks) -> dict[int, Any]:
        return dict(enumerate(results))


@attrs.frozen
class Counts(colocate.Collect):
    """A user's own collect, which returns how many rows each rank has received."""

    def join(self, results: Any, ranks: colocate.Ranks) -> Any:
        return ranks.rows


class Own(Role):
    """A role with a user's own dispatch and collect, and with every kind of Python parameter."""

    @method(dispatch=Swap(), collect=ByRank())
    def swapped(self, to: int = -1) -> tuple[int, int]:
        return self.ctx.rank, to

    @method(dispatch=Scatter("batch"), collect=Counts())
    def counted(self, batch: list[int]) -> None:
        """Do nothing, because `Counts` returns the number of rows."""

    @method(collect=First())
    def signature(self, a: int, /, b: int = 2, *rest: int, c: int, **others: int) -> Any:
        return a, b, rest, c, others
