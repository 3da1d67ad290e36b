"""Notes on the residents that a call has received, as the worker reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

Taken: TypeAlias = tuple[int, int, int, float, float, int, str]
"""A resident's key, the rank of the part, the bytes, and start and end of the transfer, in seconds of `time.time()`.

Start and end are 0 for a part of the same worker; bytes then count tensors and arrays. The last two items are the
bytes that went from device to device (`_devices/lending.py`), and the reason for bytes that didn't but might have.
"""

MANY = -1
"""Stands for the rank in a summary of many transfers."""

_MOST = 8


def summed(taken: Sequence[Taken]) -> Sequence[Taken]:
    """Merge the notes of residents with many transfers into one note each: each of N ranks may receive N parts."""
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
