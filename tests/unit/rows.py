"""Values with rows, cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._values.batch import leaf_splitter
from colocate._values.leaves import take_apart


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Contiguous parts with these numbers of rows, which add up to those of the value."""
    return take_apart(value, len(sizes), leaf_splitter(sizes))
