"""Values with rows, cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._values.batch import create_leaf_splitter
from colocate._values.leaves import split_structure


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Contiguous parts with these numbers of rows, which add up to those of the value."""
    return split_structure(value, len(sizes), create_leaf_splitter(sizes))
