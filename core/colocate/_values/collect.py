"""Collect the results of ranks into one value: as a list, joined by rows, or reduced leaf by leaf."""

from __future__ import annotations

import abc
import functools
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

import attrs

from colocate import features
from colocate._system.imported import find_imported
from colocate._system.nearest import did_you_mean
from colocate._values.batch import concat, get_row_count, slice_rows, take_rows
from colocate._values.dispatch import Dispatch, Scatter, check_place, format_declaration
from colocate._values.leaves import check_alike, is_container, rebuild
from colocate._values.mesh import Ranks
from colocate.errors import ConfigError, DispatchError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # The TypeVar of `typing` has no default before Python 3.13.

    J_co = TypeVar("J_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    J_co = TypeVar("J_co", covariant=True)

_AXES = frozenset({"dp", "tp", "pp", "cp", "sp", "ep"})  # A method may name a usual axis that no mesh has.
_OPERATIONS = ("mean", "sum", "max", "min")
_NUMBERS = frozenset({int, float, bool, complex})


class Collect(abc.ABC, Generic[J_co]):
    """A rule that joins the ranks' results into one value. Subclasses only need to define `join`.

    A subclass of `Collect[float]` declares the result type of calls; a plain `Collect` doesn't.
    """

    row_aligned: ClassVar[bool] = False
    """Whether row i of the joined value belongs to row i of the arguments, and padding is removed."""

    @abc.abstractmethod
    def join(self, results: Sequence[Any], ranks: Ranks) -> J_co:
        """Join results into one value.

        Args:
            results: The results of the targeted ranks (`ranks.targets`; all if that is None), in order. Only the
                results of `sources` must be present, the others may be None.
            ranks: The ranks, with their numbers of rows.
        """

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """Return the ranks with results that `join` uses, in the order of use."""
        return range(ranks.world_size) if ranks.targets is None else ranks.targets


@attrs.frozen
class Gather(Collect[list[Any]]):
    """Collects the results of all ranks in a list."""

    def join(self, results: Sequence[Any], ranks: Ranks) -> list[Any]:
        """Return the results as a list."""
        return list(results)


@attrs.frozen
class Concat(Collect):
    """Joins the rows of the ranks' results, one part for each position on the mesh axis.

    A part is the result of the first rank at that position, of the last pipeline stage.
    """

    row_aligned: ClassVar[bool] = True

    axis: str = "dp"
    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_place("Concat", self.axis, self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """Return one rank for each position on the mesh axis."""
        return ranks.leaders(self.axis, self.mesh)

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """Join the rows of all parts, without padding, in the order of the arguments."""
        sources = self.sources(ranks)
        parts = list(ranks.pick(results, sources))
        totals = []
        for part, rank in zip(parts, sources, strict=True):
            try:
                totals.append(get_row_count(part, "result"))
            except DispatchError as error:
                raise DispatchError(
                    f"Concat can't join what rank {rank} returned: {error.message}. Return rows, or collect with "
                    "Gather, First or Reduce",
                    rank=rank,
                ) from None
        if ranks.padded is not None and ranks.rows is not None:
            row_counts = zip(ranks.pick(ranks.padded, sources), ranks.pick(ranks.rows, sources), strict=True)
            for place, (padded, real) in enumerate(row_counts):
                if padded is None or real is None:
                    continue
                if totals[place] != padded:
                    raise DispatchError(
                        f"rank {sources[place]} was given {padded} rows, padding included, and returned "
                        f"{totals[place]}, so nobody can tell which of them are padding; return one row for each row "
                        "given, or declare Scatter(pad=False)",
                        rank=sources[place],
                    )
                if real != padded:
                    parts[place], totals[place] = slice_rows(parts[place], 0, real), real
        # Leave out empty results, which often have other shapes.
        filled_places = [place for place, total in enumerate(totals) if total] or range(len(parts))
        places = None
        if ranks.partition is not None:
            places = features.import_module_of("balance.parts").invert_partition(
                ranks.pick(ranks.partition, sources), totals, sources
            )
        whole = concat(
            [parts[place] for place in filled_places],
            "the results",
            lambda place: f"rank {sources[filled_places[place]]}",
        )
        return whole if places is None else take_rows(whole, places)

    def __repr__(self) -> str:
        return format_declaration(self, axis="dp", mesh=None)


@attrs.frozen
class First(Collect):
    """Returns the result of the first rank of the last pipeline stage."""

    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_place("First", "dp", self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """Return the first rank of the last pipeline stage, in a sequence."""
        if ranks.targets is not None and len(ranks.targets) == 1:  # In a call to one rank, the mesh doesn't matter.
            return ranks.targets
        return ranks.leaders("", self.mesh)

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """Return the result of the first rank of the last pipeline stage."""
        return results[0] if len(results) == 1 else ranks.pick(results, self.sources(ranks))[0]

    def __repr__(self) -> str:
        return format_declaration(self, mesh=None)


@attrs.frozen
class Reduce(Collect):
    """Reduces the ranks' numbers, tensors and arrays to one value, leaf by leaf in dicts, lists and tuples.

    Each place along the axis counts once. Ranks without rows don't count. The sum of integers has 64 bits, as in torch
    and NumPy.

    Attributes:
        operation: "mean", "sum", "max" or "min".
        weight: "rows" weights a mean by each rank's number of rows (if the call has rows), None weights equally.
        axis: The axis along which the ranks did different work.
        mesh: The mesh, if the role has several.
    """

    operation: Literal["mean", "sum", "max", "min"]
    weight: Literal["rows"] | None = "rows"
    axis: str = attrs.field(default="dp", kw_only=True)
    mesh: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.operation not in _OPERATIONS:
            hint = did_you_mean(str(self.operation), _OPERATIONS)
            raise ConfigError(f"Reduce({self.operation!r}): use 'mean', 'sum', 'max' or 'min'{hint}")
        if self.weight not in ("rows", None):
            raise ConfigError(f"Reduce(weight={self.weight!r}): use 'rows', or None for equal weights")
        check_place("Reduce", self.axis, self.mesh)

    def sources(self, ranks: Ranks) -> Sequence[int]:
        """Return one rank for each position on the mesh axis, without ranks that had no rows."""
        leaders = ranks.leaders(self.axis, self.mesh)
        if ranks.rows is None:
            return leaders
        real = ranks.pick(ranks.rows, leaders)
        return (
            leaders
            if 0 not in real
            else [rank for rank, row_count in zip(leaders, real, strict=True) if row_count != 0]
        )

    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        """Reduce the results of the ranks from `sources` to one value."""
        sources = self.sources(ranks)
        if not sources:
            raise DispatchError(f"{self!r}: no rank worked on any rows, so there is nothing to reduce")
        weights: Sequence[int] | None = None
        if self.operation == "mean" and self.weight == "rows" and ranks.rows is not None:
            rank_rows = [row_count for row_count in ranks.pick(ranks.rows, sources) if row_count is not None]
            weights = rank_rows if len(rank_rows) == len(sources) else None
        return reduce_values(ranks.pick(results, sources), self.operation, weights, sources)

    def __repr__(self) -> str:
        return format_declaration(self, repr(self.operation), weight="rows", axis="dp", mesh=None)


def check_collect(dispatch: Any, collect: Any, where: str) -> None:
    """Raise a `DispatchError` unless a method's dispatch and collect fit together."""
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
    """Raise a `DispatchError` if a method names a mesh or an unusual axis that the role doesn't have."""
    for value in (dispatch, collect):
        mesh, axis = getattr(value, "mesh", None), getattr(value, "axis", None)
        if mesh is not None and mesh not in ranks.meshes:
            hint = did_you_mean(mesh, ranks.meshes)
            raise DispatchError(f"{where}: {value!r} names the mesh {mesh!r}, which the role doesn't have{hint}")
        if axis is None or axis in _AXES:
            continue
        axes = {name for role_mesh in ranks.meshes.values() for name in role_mesh.shape} | _AXES
        if axis not in axes:
            raise DispatchError(
                f"{where}: {value!r} names the axis {axis!r}, which none of the role's meshes has"
                f"; it is no usual axis either{did_you_mean(axis, sorted(axes))}"
            )


def reduce_values(
    values: Sequence[Any],
    operation: str,
    weights: Sequence[int] | None,
    ranks: Sequence[int],
    keys: tuple[Any, ...] = (),
) -> Any:
    """Reduce values of equal structure to one value. `weights` are for a mean; None means equal weights.

    The result type doesn't depend on the number of values: a mean of integers is a float.
    """
    first: Any = values[0]
    path = "the results" + "".join(f"[{key!r}]" for key in keys)
    if first is None or isinstance(first, (dict, list, tuple)) or is_container(first):
        check_alike(values, path, lambda index: f"rank {ranks[index]}")
        if first is None:
            return None
        if isinstance(first, Mapping):
            columns: Any = ((key, [value[key] for value in values]) for key in first)
        else:
            columns = enumerate(zip(*values, strict=True))
        reduced = {key: reduce_values(items, operation, weights, ranks, (*keys, key)) for key, items in columns}
        if isinstance(first, Mapping):
            return rebuild(first, reduced)
        return list(reduced.values()) if isinstance(first, list) else rebuild(first, reduced.values())
    family = _choose_reducer(first)
    for index, value in enumerate(values):
        if family is None or _choose_reducer(value) is not family:
            description = "None" if value is None else f"a {type(value).__name__}"
            comparison = "" if family is None else f", where rank {ranks[0]} has a {type(first).__name__}"
            raise DispatchError(
                f"{path}: rank {ranks[index]} has {description}{comparison}; numbers, tensors and arrays "
                f"alike on all ranks "
                "can be reduced, so return those, or collect with Gather or First",
                rank=ranks[index],
            )
        if family is not _reduce_numbers and value.shape != first.shape:
            raise DispatchError(
                f"{path}: the shapes are {tuple(first.shape)} on rank {ranks[0]} and {tuple(value.shape)} on "
                f"rank {ranks[index]}; equal shapes can be reduced",
                rank=ranks[index],
            )
    try:
        return family(values, operation, weights or [1] * len(values))
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise DispatchError(f"{path}: no {operation} can be made of {type(first).__name__}: {error}") from error


def _choose_reducer(value: Any) -> Any:
    """Return the function that reduces values of this type, or None."""
    if type(value) in _NUMBERS or isinstance(value, numbers.Number):
        return _reduce_numbers
    numpy, torch = find_imported("numpy"), find_imported("torch")
    if numpy is not None and isinstance(value, numpy.bool_):
        return _reduce_numbers
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _reduce_arrays
    return _reduce_tensors if torch is not None and isinstance(value, torch.Tensor) and not value.is_nested else None


def _reduce_numbers(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    numpy = find_imported("numpy")
    kinds = {getattr(getattr(value, "dtype", None), "kind", "") for value in values}
    # Convert to arrays, because a product in a NumPy number's own type may overflow.
    if numpy is not None and operation in ("mean", "sum") and not kinds.isdisjoint("biufc"):
        return _reduce_arrays(list(map(numpy.asarray, values)), operation, weights)[()]
    if operation == "mean":
        return sum(map(operator.mul, values, weights)) / sum(weights)
    if operation == "sum":
        return sum(values)
    # Handle NaNs first, because the results of Python's max and min depend on a NaN's position.
    strange = [value for value in values if value != value]
    return strange[0] if strange else max(values) if operation == "max" else min(values)


def _reduce_arrays(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    """Reduce arrays to one array. The sum of integers has 64 bits, like NumPy's sum."""
    import numpy as np

    if operation in ("max", "min"):
        return functools.reduce(np.maximum if operation == "max" else np.minimum, values)
    dtype = np.result_type(*values)
    if operation == "sum" and dtype.kind != "f":
        if dtype.kind in "biu":
            values = [value.astype(np.uint64 if dtype.kind == "u" else np.int64) for value in values]
        return functools.reduce(np.add, values)
    inexact = dtype if dtype.kind in "fc" else np.result_type(dtype, np.float64)
    wide = np.result_type(inexact, np.float32)  # Half precision would lose digits.
    parts = [value.astype(wide) for value in values]
    if operation == "mean":
        total = sum(weights)
        parts = [part * (weight / total) for part, weight in zip(parts, weights, strict=True)]
    return np.asanyarray(functools.reduce(np.add, parts)).astype(inexact)  # `asanyarray` keeps masks.


def _reduce_tensors(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    """Reduce tensors to one tensor. The sum of integers is an int64, like torch's sum."""
    import torch

    values = [value.detach().to(values[0].device) for value in values]
    if operation in ("max", "min"):
        return functools.reduce(torch.maximum if operation == "max" else torch.minimum, values)
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    if operation == "sum":
        wide = dtype
        if dtype.is_floating_point:
            wide = torch.promote_types(dtype, torch.float32)  # Half precision would lose digits.
        elif not dtype.is_complex and not values[0].is_quantized and dtype is not torch.uint64:
            dtype = wide = torch.int64
        return functools.reduce(torch.add, [value.to(wide) for value in values]).to(dtype)
    inexact = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    if len(values) == 1:
        return values[0].to(inexact)
    total, wide = sum(weights), torch.promote_types(inexact, torch.float32)  # Half precision would lose digits.
    mean = values[0].to(wide) * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean.add_(value.to(wide), alpha=weight / total)
    return mean.to(inexact)
