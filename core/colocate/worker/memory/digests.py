"""Numbers that tell whether memory of a device has changed, worked out where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._system.imported import imported

_WORDS_AT_ONCE = 1 << 20  # what is looked at needs twice as much memory beside it
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_PRIME = 1_000_003


def digests(views: Sequence[Any]) -> list[int | None]:
    """Numbers of 64 bits that depend on each byte, its place, and how many there are.

    Each word is mixed with its place before all are added (two rounds of SplitMix64, Steele et al. 2014): a sum of
    products would be the same for many permutations, and wherever an even number of signs have changed.

    Args:
        views: Bytes, as tensors of one device.

    Returns:
        One for each; None for those for which the device hasn't even the room: what sleeps then is what others want.
    """
    if not views:
        return []
    torch = imported("torch")
    totals: list[Any] = []
    try:
        most = min(_WORDS_AT_ONCE, max(view.numel() // 8 for view in views))
        places = torch.arange(1, most + 1, dtype=torch.int64, device=views[0].device).mul_(_WEYL)
        for view in views:
            totals.append(_digest(view, places))
        numbers: list[int | None] = torch.stack(totals).tolist()  # for which the device is waited for, once
    except torch.OutOfMemoryError:
        numbers = [int(total) for total in totals]
    return [*numbers, *[None] * (len(views) - len(numbers))]


def _digest(view: Any, places: Any) -> Any:
    torch = imported("torch")
    whole = view.numel() // 8 * 8
    total = torch.full((), view.numel(), dtype=torch.int64, device=view.device)
    for part in view[:whole].view(torch.int64).split(_WORDS_AT_ONCE):
        mixed = part + places[: part.numel()]
        for shift, factor in _ROUNDS:
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total = total * _PRIME + mixed.sum()
    for byte in view[whole:].tolist():
        total = total * _PRIME + byte
    return total
