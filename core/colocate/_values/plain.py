"""Plain values, in which nobody looks for anything; and how many rows each part gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Partition: TypeAlias = Sequence[Sequence[int]]
"""For each part the numbers of its rows in the whole, in ascending order."""
PLAIN = frozenset({int, float, str, bool, bytes, type(None)})
"""Types of values in which there is nothing else: what long lists are mostly made of."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a list of these."""
    kind = type(value)
    return kind in PLAIN or (kind is list and PLAIN.issuperset(map(type, value)))


def are_plain(items: Sequence[Any], depth: int = 2) -> bool:
    """Whether these are numbers, texts and the like, also in tuples and in tuples of these: as a row's tokens are."""
    kinds = set(map(type, items)) - PLAIN
    return not kinds or (
        depth > 0 and kinds == {tuple} and all(are_plain(each, depth - 1) for each in items if type(each) is tuple)
    )


def even_sizes(total: int, count: int, of: int = 1) -> list[int]:
    """Return the rows of `count` parts that differ by one set of `of` rows at most, the larger ones first."""
    each, more = divmod(total // of, count)
    return [(each + 1) * of] * more + [each * of] * (count - more)


def padded_sizes(total: int, count: int) -> tuple[int, list[int]]:
    """Return the rows of each of `count` equal parts, and how many are real: the padding is at the very end."""
    each = -(-total // count)
    return each, [min(max(total - index * each, 0), each) for index in range(count)]
