"""Epochs: each driver that commands a pool has one, higher than that of any before."""

from __future__ import annotations

_BITS = 40  # more calls than a driver can make


def base_of(epoch: int) -> int:
    """The numbers of an epoch's calls, holds and residents are above this, and not above that of the next epoch."""
    return (epoch - 1) << _BITS
