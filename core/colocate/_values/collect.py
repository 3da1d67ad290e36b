"""Collect: how the results of the ranks become one value."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import attrs

from colocate._system.nearest import did_you_mean
from colocate._values.batch import concat, rows, slice_rows
from colocate._values.dispatch import Dispatch, Scatter, check_place
from colocate._values.mesh import Ranks
from colocate._values.reduce import OPERATIONS, reduce_values
from colocate.errors import ConfigError, DispatchError

CONVENTIONAL_AXES = frozenset({"dp", "tp", "pp", "cp", "sp", "ep"})


class Collect(abc.ABC):
    """How results become one value. Subclass it, with `join` alone, for a way of your own."""

    row_aligned: ClassVar[bool] = False
    """Whether row i of the joined value belongs to row i of the arguments, and padding is taken out of it."""

    @abc.abstractmethod
    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """One value.

        Args:
            results: The results, one for each rank that the call went to (`ranks.targets`; all when that is None), in
                order. Only those of `sources` need be there, the others may be None.
            ranks: The ranks, with the rows that they worked on.
        """

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """The ranks whose results `join` looks at, in the order of its looking."""
        return range(ranks.world_size) if ranks.targets is None else ranks.targets


@attrs.frozen
class Gather(Collect):
    """A list with the result of each rank, whatever the mesh."""

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """The results as a list."""
        return list(results)

    def __repr__(self) -> str:
        return "Gather()"


@attrs.frozen
class Concat(Collect):
    """The rows of the results one after the other, with one copy of each part of the axis.

    A part is taken from the first rank along the other axes and the last pipeline stage.
    """

    row_aligned: ClassVar[bool] = True

    axis: str = "dp"
    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_place("Concat", self.axis, self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """One rank per part."""
        return ranks.leaders(self.axis, self.mesh)

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """The rows of all parts, without padding."""
        sources = self.sources(ranks)
        parts = list(ranks.pick(results, sources))
        totals = [_result_rows(part, rank) for rank, part in zip(sources, parts, strict=True)]
        if ranks.padded is not None and ranks.rows is not None:
            padded, real = ranks.pick(ranks.padded, sources), ranks.pick(ranks.rows, sources)
            for place, rank in enumerate(sources):
                parts[place], totals[place] = _trim(parts[place], totals[place], padded[place], real[place], rank)
        # Results of no rows often have other shapes than those with rows, and nothing to add to them.
        kept = [place for place, total in enumerate(totals) if total] or range(len(parts))
        return concat([parts[place] for place in kept], "the results", lambda place: f"rank {sources[kept[place]]}")

    def __repr__(self) -> str:
        options = ([f"axis={self.axis!r}"] if self.axis != "dp" else []) + _mesh_option(self.mesh)
        return f"Concat({', '.join(options)})"


@attrs.frozen
class First(Collect):
    """The result of the first rank of the last pipeline stage."""

    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_place("First", "dp", self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """The one rank."""
        if ranks.targets is not None and len(ranks.targets) == 1:  # a call to one rank: the mesh doesn't matter
            return ranks.targets
        return ranks.leaders("", self.mesh)

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """That rank's result."""
        return results[0] if len(results) == 1 else ranks.pick(results, self.sources(ranks))[0]

    def __repr__(self) -> str:
        return f"First({', '.join(_mesh_option(self.mesh))})"


@attrs.frozen
class Reduce(Collect):
    """Numbers, tensors and arrays of the ranks as one, leaf by leaf in dicts, lists and tuples.

    Each place along the axis counts once. A rank that worked on no rows doesn't count at all. A sum of whole numbers is
    of 64 bits, as torch's and NumPy's own sums are.

    Attributes:
        operation: "mean", "sum", "max" or "min".
        weight: "rows" weighs the ranks of a mean by the rows they worked on (where the call has rows), None equally.
        axis: The axis along which the ranks did different work.
        mesh: The mesh, when the role has several.
    """

    operation: Literal["mean", "sum", "max", "min"]
    weight: Literal["rows"] | None = "rows"
    axis: str = attrs.field(default="dp", kw_only=True)
    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            hint = did_you_mean(str(self.operation), OPERATIONS)
            raise ConfigError(f"Reduce({self.operation!r}): use 'mean', 'sum', 'max' or 'min'{hint}")
        if self.weight not in ("rows", None):
            raise ConfigError(f"Reduce(weight={self.weight!r}): use 'rows', or None for equal weights")
        check_place("Reduce", self.axis, self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """One rank per place along the axis, without those that had no rows."""
        leaders = ranks.leaders(self.axis, self.mesh)
        if ranks.rows is None:
            return leaders
        real = ranks.pick(ranks.rows, leaders)
        return leaders if 0 not in real else [rank for rank, own in zip(leaders, real, strict=True) if own != 0]

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """The one value of all ranks that count."""
        sources = self.sources(ranks)
        if not sources:
            raise DispatchError(f"{self!r}: no rank worked on any rows, so there is nothing to reduce")
        weights: Sequence[int] | None = None
        if self.operation == "mean" and self.weight == "rows" and ranks.rows is not None:
            known = [own for own in ranks.pick(ranks.rows, sources) if own is not None]
            weights = known if len(known) == len(sources) else None
        return reduce_values(ranks.pick(results, sources), self.operation, weights, sources)

    def __repr__(self) -> str:
        options = ["weight=None"] if self.weight is None else []
        options += [f"axis={self.axis!r}"] if self.axis != "dp" else []
        return f"Reduce({', '.join([repr(self.operation), *options, *_mesh_option(self.mesh)])})"


def check(dispatch: Any, collect: Any, where: str) -> None:
    """Check that a dispatch and a collect go together, when the class is declared.

    Raises:
        DispatchError: They don't, or they aren't what they should be.
    """
    for name, value, base in (("dispatch", dispatch, Dispatch), ("collect", collect, Collect)):
        if not isinstance(value, base):
            called = f"{value.__name__}(...)" if isinstance(value, type) else f"a {base.__name__}"
            raise DispatchError(f"{where}: {name}={value!r} is no {base.__name__}; write {name}={called}")
    if isinstance(dispatch, Scatter) and dispatch.pad is True and not collect.row_aligned:
        raise DispatchError(
            f"{where}: with {dispatch!r} the padding would show in what {collect!r} makes of the results; "
            "use collect=Concat(), which takes it out, or pad='masked' and honour ctx.valid_rows in the method, or "
            "pad=False"
        )


def check_meshes(dispatch: Dispatch, collect: Collect, ranks: Ranks, where: str) -> None:
    """Check the meshes and axes that a method names against those that its role was given.

    Raises:
        DispatchError: There is no such mesh, or the axis is in none of the meshes and isn't a usual one either.
    """
    for value in (dispatch, collect):
        mesh, axis = getattr(value, "mesh", None), getattr(value, "axis", None)
        if mesh is not None and mesh not in ranks.meshes:
            hint = did_you_mean(mesh, ranks.meshes)
            raise DispatchError(f"{where}: {value!r} names the mesh {mesh!r}, which the role doesn't have{hint}")
        if axis is None or axis in CONVENTIONAL_AXES:
            continue
        known = {name for own in ranks.meshes.values() for name in own.shape} | CONVENTIONAL_AXES
        if axis not in known:
            raise DispatchError(
                f"{where}: {value!r} names the axis {axis!r}, which none of the role's meshes has"
                f"; it is no usual axis either{did_you_mean(axis, sorted(known))}"
            )


def _result_rows(result: Any, rank: int) -> int:
    try:
        return rows(result, "result")
    except DispatchError as error:
        raise DispatchError(
            f"Concat can't join what rank {rank} returned: {error.message}. Return rows, or collect with "
            "Gather, First or Reduce",
            rank=rank,
        ) from None


def _trim(part: Any, total: int, padded: int | None, real: int | None, rank: int) -> tuple[Any, int]:
    if padded is None or real is None:
        return part, total
    if total != padded:
        raise DispatchError(
            f"rank {rank} was given {padded} rows, padding included, and returned {total}, so nobody can tell which of "
            "them are padding; return one row for each row given, or declare Scatter(pad=False)",
            rank=rank,
        )
    return (part, total) if real == padded else (slice_rows(part, 0, real), real)


def _mesh_option(mesh: str | None) -> list[str]:
    return [] if mesh is None else [f"mesh={mesh!r}"]
