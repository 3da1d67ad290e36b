"""Columns of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def columns(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Lines of cells as text, each column as wide as its widest cell.

    Args:
        lines: The cells of each line, as many as there are columns.
        right: For each column whether its cells stand at its right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def keys_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The columns of rows: every key that one of them has, in the order in which they come up."""
    return tuple(dict.fromkeys(key for row in rows for key in row))
