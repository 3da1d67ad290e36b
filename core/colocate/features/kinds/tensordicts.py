"""Cuts and joins rows of TensorDicts and tensorclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from colocate._values.kinds import Kind, Memo, concat_jagged, slice_jagged


class _TensorDictKind(Kind):
    """Handles rows of TensorDicts and tensorclasses.

    Jagged entries, which TensorDict can't index, are cut one by one.
    """

    def length(self, value: Any) -> int | None:
        return int(value.batch_size[0]) if value.batch_size else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        return _combine_entries(
            [value],
            lambda parts: parts[0][start:stop],
            lambda entries: slice_jagged(entries[0], start, stop, memo),
        )

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import torch

        device = _device_of(parts[0])
        parts = [part if _device_of(part) in (device, None) else part.to(device) for part in parts]
        return _combine_entries(parts, torch.cat, lambda entries: concat_jagged(entries, memo))


def _combine_entries(parts: list[Any], usual: Callable[[Any], Any], jagged: Callable[[list[Any]], Any]) -> Any:
    """Make one TensorDict of several, in the key order of the first.

    `jagged` joins jagged entries, `usual` all others.
    """
    ragged = _ragged_entries(parts[0])
    if not ragged:
        return usual(parts)
    result = usual([part.exclude(*ragged) for part in parts])
    for key in ragged:
        result.set(key, jagged([part.get(key) for part in parts]))
    for place in {key[:-1] for key in ragged}:  # This restores the key order, because `set` has appended the keys.
        like = parts[0].get(place) if place else parts[0]
        (result.get(place) if place else result).select(*like.keys(), inplace=True)
    return result


def _device_of(value: Any) -> Any:
    """Return the device of a TensorDict, or else of the first tensor; None without tensors."""
    if value.device is not None:
        return value.device
    if isinstance(value, sys.modules["tensordict"].LazyStackedTensorDict):  # Reading the entries would stack the rows.
        return _device_of(value.tensordicts[0])
    return next((item.device for item in value.values(True, True) if hasattr(item, "is_cpu")), None)


def _ragged_entries(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    tensordict = sys.modules["tensordict"]
    if isinstance(value, tensordict.LazyStackedTensorDict):
        return []  # The value is a list of rows, and reading entries would stack all rows.
    entries = []
    for key, item in value.items():
        if tensordict.is_tensor_collection(item):
            entries += _ragged_entries(item, (*prefix, key))
        elif getattr(item, "is_nested", False):
            entries.append((*prefix, key))
    return entries


KIND = _TensorDictKind()
