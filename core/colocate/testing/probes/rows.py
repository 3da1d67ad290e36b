"""Roles on rows: every dispatch and collect, meshes, and those of a user's own."""

from __future__ import annotations

from typing import Any

import attrs

import colocate
from colocate import Broadcast, Concat, First, Gather, OnRank, PerRank, Reduce, Role, Scatter, method


class Rows(Role):
    """Every dispatch and collect, on lists of numbers."""

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
        """Return what each rank gets, and how much of it is real."""
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
        """The mean of the rows; NaN on a rank without any, which doesn't count."""
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
    """Where the ranks lie in a mesh, and what reaches them there."""

    @method
    def coordinates(self, *axes: str) -> list[tuple[int, int]]:
        return [(self.ctx.mesh.rank(axis), self.ctx.mesh.size(axis)) for axis in axes]

    @method(dispatch=Scatter("batch"), collect=Gather())
    def seen(self, batch: list[int]) -> list[int]:
        """Return what each rank gets of a batch spread over dp."""
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
    """A dispatch of a user's own: rank i gets the arguments with `to` set to the rank counted from the end."""

    def split(self, arguments: Any, ranks: colocate.Ranks) -> list[dict[str, Any]]:
        return [{**arguments, "to": ranks.world_size - 1 - rank} for rank in range(ranks.world_size)]


@attrs.frozen
class ByRank(colocate.Collect):
    """A collect of a user's own: a dict by rank."""

    def join(self, results: Any, ranks: colocate.Ranks) -> dict[int, Any]:
        return dict(enumerate(results))


@attrs.frozen
class Counts(colocate.Collect):
    """Another one: how many rows each rank worked on, as the framework tells it."""

    def join(self, results: Any, ranks: colocate.Ranks) -> Any:
        return ranks.rows


class Own(Role):
    """A dispatch and a collect of a user's own, and all that Python's signatures allow."""

    @method(dispatch=Swap(), collect=ByRank())
    def swapped(self, to: int = -1) -> tuple[int, int]:
        return self.ctx.rank, to

    @method(dispatch=Scatter("batch"), collect=Counts())
    def counted(self, batch: list[int]) -> None:
        """Have them counted."""

    @method(collect=First())
    def signature(self, a: int, /, b: int = 2, *rest: int, c: int, **others: int) -> Any:
        return a, b, rest, c, others
