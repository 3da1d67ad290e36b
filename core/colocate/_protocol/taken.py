"""What a call was given of residents, as its worker tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

Taken: TypeAlias = tuple[int, int, int, float, float, int, str]
"""A resident's key, the rank whose part that is of, its bytes, and from when to when it was on its way, in seconds of
`time.time()`. Both are 0 where it lay in the very worker; bytes are those of tensors and arrays then. At last, how many
of the bytes went from device to device (`_devices/lending.py`), and why others didn't that might have."""

MANY = -1
"""In place of a rank: it came from many."""

_MOST = 8


def summed(taken: Sequence[Taken]) -> Sequence[Taken]:
    """Return what a call was told to have been given, where no resident has many notes: of N ranks each may get N."""
    counts = Counter(each[0] for each in taken if each[4])
    if all(count <= _MOST for count in counts.values()):
        return taken
    found = [each for each in taken if counts[each[0]] <= _MOST or not each[4]]
    for key in (key for key, count in counts.items() if count > _MOST):
        came = [each for each in taken if each[0] == key and each[4]]
        _, _, sizes, starts, ends, lent, refusals = zip(*came, strict=True)
        refusal = next(filter(None, refusals), "")
        found.append((key, MANY, sum(sizes), min(starts), max(ends), sum(lent), refusal))
    return found
