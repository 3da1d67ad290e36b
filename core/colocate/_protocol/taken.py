"""Notes about residents that a call has received, as reported by the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

Receipt: TypeAlias = tuple[int, int, int, float, float, int, str]
"""A resident's key, the rank of the part, the bytes, and start and end of the transfer, in seconds of `time.time()`.

Start and end are 0 for a part of the same worker; bytes then count tensors and arrays. The last two items are the
bytes that went from device to device (`_devices/lending.py`), and the reason for bytes that didn't but might have.
"""

MANY = -1
"""Stands for the rank in a summary of many transfers."""

_MOST = 8


def summarize_receipts(taken: Sequence[Receipt]) -> Sequence[Receipt]:
    """Merge the notes of a resident with many transfers into one note, because each of N ranks may receive N parts."""
    counts = Counter(receipt[0] for receipt in taken if receipt[4])
    if all(count <= _MOST for count in counts.values()):
        return taken
    summary = [receipt for receipt in taken if counts[receipt[0]] <= _MOST or not receipt[4]]
    for key in (key for key, count in counts.items() if count > _MOST):
        many = [receipt for receipt in taken if receipt[0] == key and receipt[4]]
        _, _, sizes, starts, ends, lent, refusals = zip(*many, strict=True)
        refusal = next(filter(None, refusals), "")
        summary.append((key, MANY, sum(sizes), min(starts), max(ends), sum(lent), refusal))
    return summary
