"""What a job showed at its end: tables of whatever it likes, answers before and after among them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from colocate.texts import plural
from colocate_report.scale import number, shorten, words

ROWS = 200
CHARACTERS = 600  # of a cell


@attrs.frozen
class Cell:
    """A cell: its text, whether it is a number, and whether it equals what the row says is right (None: no matter)."""

    text: str
    numeric: bool
    right: bool | None


@attrs.frozen
class Table:
    """A table: title, heads, rows; and what was left out, in words."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    hidden: str


def tables(shown: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Table, ...]:
    """Return what the job showed, cut to what a page can hold.

    A row that has a `right` has its answers marked: `before` and `after`, by whether they equal it.
    """
    return tuple(table(title, rows) for title, rows in shown.items())


def table(title: str, rows: Sequence[Mapping[str, Any]], sizes: Collection[str] = ()) -> Table:
    """Return one. Args: sizes: The columns whose texts stand for numbers."""
    columns = keys_of(rows)
    hidden = len(rows) - ROWS
    return Table(
        title=title,
        heads=tuple(words(str(column)) for column in columns),
        rows=tuple(tuple(_cell(row, column, sizes) for column in columns) for row in rows[:ROWS]),
        hidden=f"and {plural(hidden, 'more row')}" if hidden > 0 else "",
    )


def _cell(row: Mapping[str, Any], column: str, sizes: Collection[str]) -> Cell:
    value = row.get(column)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    text = "" if value is None else number(value) if numeric else str(value)
    judged = column in ("before", "after") and row.get("right") is not None
    return Cell(shorten(text, CHARACTERS), numeric or column in sizes, value == row["right"] if judged else None)


def keys_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The columns of rows: every key that one of them has, in the order in which they come up."""
    return tuple(dict.fromkeys(key for row in rows for key in row))
