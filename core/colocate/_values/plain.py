"""Detect plain values, which contain no tensors, and compute the sizes of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Partition: TypeAlias = Sequence[Sequence[int]]
"""For each part its row indices in the whole, ascending."""
PLAIN = frozenset({int, float, str, bool, bytes, type(None)})
"""Types without contents of their own: most items of long lists."""


def is_plain(value: Any) -> bool:
    """Return whether a value's type is in `PLAIN`, or the value is a list of such values."""
    kind = type(value)
    return kind in PLAIN or (kind is list and PLAIN.issuperset(map(type, value)))


def are_plain(items: Sequence[Any], depth: int = 2) -> bool:
    """Return whether all items are plain values, or tuples of plain values nested up to `depth` levels."""
    kinds = set(map(type, items)) - PLAIN
    return not kinds or (
        depth > 0 and kinds == {tuple} and all(are_plain(item, depth - 1) for item in items if type(item) is tuple)
    )


def split_evenly(total: int, count: int, of: int = 1) -> list[int]:
    """Return the sizes of `count` nearly equal parts, in multiples of `of` rows, larger parts first."""
    size, more = divmod(total // of, count)
    return [(size + 1) * of] * more + [size * of] * (count - more)


def split_padded(total: int, count: int) -> tuple[int, list[int]]:
    """Return the padded size of `count` equal parts, and the number of real rows in each part.

    All padding is at the end.
    """
    size = -(-total // count)
    return size, [min(max(total - index * size, 0), size) for index in range(count)]
