"""Splits values by their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._values.batch import create_leaf_splitter
from colocate._values.leaves import split_structure


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Return contiguous parts with these numbers of rows, which add up to the value's."""
    return split_structure(value, len(sizes), create_leaf_splitter(sizes))
