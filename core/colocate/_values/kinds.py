"""Count, cut and join the rows of lists, arrays and tensors (`kind_of`).

Types of other libraries are recognised by class name, so that none of these libraries is imported here: a process with
a tensor has imported torch already. Special kinds are in `features/kinds`, such as the kind for TensorDicts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import attrs

from colocate import features
from colocate._system.by_type import by_type
from colocate._system.imported import find_imported
from colocate.errors import DispatchError


@attrs.define(eq=False)
class Memo:
    """A cache of intermediate results during one operation.

    Jagged tensors compute together only if they share the same offsets object, so tensors that share offsets before an
    operation must share offsets afterwards.
    """

    _results: dict[Hashable, tuple[Any, Any]] = attrs.field(factory=dict)

    def get(self, what: str, sources: Sequence[Any], extra: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for these source objects; call `make` only the first time."""
        key = (what, *map(id, sources), extra)
        if key not in self._results:
            self._results[key] = (make(), tuple(sources))  # Keeping the sources alive prevents a reuse of ids.
        return self._results[key][0]


class Kind:
    """The row operations for one kind of value. This base class handles lists."""

    def length(self, value: Any) -> int | None:
        """Return the number of rows; None for a value without rows (a 0-d tensor)."""
        return len(value)

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        """Return the rows from `start` to before `stop`."""
        return value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        """Join the rows of at least two parts, in order."""
        return list(chain.from_iterable(parts))

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        """Cut a value into contiguous parts of these sizes, which must add up to the length."""
        return [self.slice(value, start, stop, memo) for start, stop in pairwise(accumulate(sizes, initial=0))]

    def items(self, value: Any, memo: Memo) -> Sequence[Any]:
        """Return the individual rows: the items of a list, or a tensor's slices, each with one axis less."""
        return list(value.unbind(0)) if hasattr(value, "unbind") else list(value)

    def take_rows(self, value: Any, rows: Sequence[int], memo: Memo) -> Any:
        """Return the rows at these indices, in the given order."""
        runs: list[tuple[int, int]] = []
        for row in rows:
            if runs and runs[-1][1] == row:
                runs[-1] = runs[-1][0], row + 1
            else:
                runs.append((row, row + 1))
        if len(runs) < 2:
            return self.slice(value, *(runs or [(0, 0)])[0], memo)
        return self._take_runs(value, rows, runs, memo)

    def _take_runs(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        return self.concat([self.slice(value, *run, memo) for run in runs], memo)


class _Array(Kind):
    def length(self, value: Any) -> int | None:
        return len(value) if value.ndim else None

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import numpy as np

        if any(isinstance(part, np.ma.MaskedArray) for part in parts):
            # The ordinary `numpy.concatenate` would drop the masks.
            concatenate: Callable[[Sequence[Any]], Any] = np.ma.concatenate
            return concatenate(parts)
        joined = np.concatenate(parts)
        # Convert the result back if all parts have the same array subclass.
        if type(joined) is not type(parts[0]) and {*map(type, parts)} == {type(parts[0])}:
            return parts[0].__array_wrap__(joined)
        return joined

    def _take_runs(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        return value[list(rows)]


class _Tensor(Kind):
    def length(self, value: Any) -> int | None:
        if value.is_nested:
            return int(value.size(0)) if str(value.layout) == "torch.jagged" else None
        return int(value.shape[0]) if value.dim() else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        layout = str(value.layout)
        if layout == "torch.sparse_coo":
            return value.narrow_copy(0, start, stop - start)
        if layout.startswith("torch.sparse_"):
            raise DispatchError(f"a tensor of layout {layout} can't be cut by rows; give it as .to_sparse_coo()")
        return slice_jagged(value, start, stop, memo) if value.is_nested else value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import torch

        device = parts[0].device
        parts = [part if part.device == device else part.to(device) for part in parts]
        if any(part.is_nested for part in parts):
            return concat_jagged(parts, memo)
        shapes = [tuple(part.shape) for part in parts]
        if len({shape[1:] for shape in shapes}) > 1:  # `torch.cat` would accept an empty vector among other shapes.
            more = f" and {len(shapes) - 6} more" if len(shapes) > 6 else ""
            raise ValueError(f"their shapes are {', '.join(map(str, shapes[:6]))}{more}")
        return torch.cat(list(parts))

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        if value.is_nested or str(value.layout).startswith("torch.sparse_"):
            return super().split(value, sizes, memo)
        return list(value.split(list(sizes)))

    def _take_runs(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        if value.is_nested or str(value.layout) != "torch.strided":
            return super()._take_runs(value, rows, runs, memo)
        return value[list(rows)]


def _pack_jagged(value: Any, memo: Memo) -> tuple[Any, Any, int]:
    """Return the values of a jagged tensor without holes, the offsets, and the ragged dimension of the values."""
    import torch

    dim, offsets, lengths = value._ragged_idx, value.offsets(), value.lengths()
    if lengths is None:
        return value.values(), offsets, dim - 1

    def add_up() -> Any:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)

    items = [item for item in value.unbind() if item.shape[dim - 1]]
    values = torch.cat(items, dim - 1) if items else value.values().narrow(dim - 1, 0, 0)
    return values, memo.get("packed", [offsets, lengths], None, add_up), dim - 1


def slice_jagged(value: Any, start: int, stop: int, memo: Memo) -> Any:
    import torch

    values, offsets, dim = _pack_jagged(value, memo)
    first, last = int(offsets[start]), int(offsets[stop])
    part = memo.get("slice", [offsets], (start, stop), lambda: offsets[start : stop + 1] - first)
    values = values.narrow(dim, first, last - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets=part, jagged_dim=dim + 1)


def concat_jagged(parts: Sequence[Any], memo: Memo) -> Any:
    import torch

    if not all(part.is_nested and part.layout is torch.jagged for part in parts):
        raise ValueError("some of them are jagged tensors and some are not")
    packed = [_pack_jagged(part, memo) for part in parts]
    dim = packed[0][2]
    if any(other != dim for _, _, other in packed):
        raise ValueError("they are jagged in different dimensions")

    def chained() -> Any:
        *starts, end = accumulate((int(offsets[-1]) for _, offsets, _ in packed), initial=0)
        shifted = [offsets[:-1] + start for (_, offsets, _), start in zip(packed, starts, strict=True)]
        return torch.cat([*shifted, packed[-1][1].new_tensor([end])])

    offsets = memo.get("concat", [offsets for _, offsets, _ in packed], None, chained)
    values = torch.cat([values for values, _, _ in packed], dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=dim + 1)


kinds: dict[type, Kind] = {list: Kind()}
"""The registered kinds, by type."""
NAMED = {"numpy.ndarray": _Array(), "torch.Tensor": _Tensor()}


@by_type
def is_collection(kind: type) -> bool:
    """Return whether values of a type are TensorDicts or tensorclass instances."""
    tensordict = find_imported("tensordict")
    # `batch_size` is checked first, because tensordict's own check keeps a reference to each type.
    if tensordict is None or not hasattr(kind, "batch_size"):
        return False
    return bool(tensordict.is_tensor_collection(kind))


@by_type
def find_kind(cls: type) -> Kind | None:
    """Return the row operations (`Kind`) for values of a type; None for types without rows.

    The nearest class in the method resolution order decides.
    """
    for base in cls.__mro__:
        kind = kinds.get(base) or NAMED.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return kind
    return features.import_module_of("kinds.tensordicts").KIND if is_collection(cls) else None
