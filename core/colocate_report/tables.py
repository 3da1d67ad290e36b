"""Convert the tables of a job for the page. Long tables are cut, and answers are marked as right or wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from colocate.texts import format_count
from colocate_report.scale import format_number, humanize, shorten_text

ROWS = 200
CHARACTERS = 600  # The most characters of a cell.


@attrs.frozen
class Cell:
    """A cell of a table: text, alignment, and whether the value is a right answer (None for other values)."""

    text: str
    numeric: bool
    right: bool | None


@attrs.frozen
class Table:
    """A table for the page: title, column heads, rows, and a note on omitted rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    hidden: str


def make_tables(shown: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Table, ...]:
    """Convert a job's tables for the page; long tables are cut.

    In a row with a `right`, the answers `before` and `after` are marked as right or wrong.
    """
    return tuple(table(title, rows) for title, rows in shown.items())


def table(title: str, rows: Sequence[Mapping[str, Any]], sizes: Collection[str] = ()) -> Table:
    """Convert one table for the page.

    Args:
        title: The title.
        rows: The rows; keys are columns.
        sizes: Columns of texts to align as numbers.
    """
    columns = column_names(rows)
    hidden = len(rows) - ROWS
    return Table(
        title=title,
        heads=tuple(humanize(str(column)) for column in columns),
        rows=tuple(tuple(_make_cell(row, column, sizes) for column in columns) for row in rows[:ROWS]),
        hidden=f"and {format_count(hidden, 'more row')}" if hidden > 0 else "",
    )


def _make_cell(row: Mapping[str, Any], column: str, sizes: Collection[str]) -> Cell:
    value = row.get(column)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    text = "" if value is None else format_number(value) if numeric else str(value)
    judged = column in ("before", "after") and row.get("right") is not None
    return Cell(shorten_text(text, CHARACTERS), numeric or column in sizes, value == row["right"] if judged else None)


def column_names(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the columns of rows: all keys, in the order of first appearance."""
    return tuple(dict.fromkeys(key for row in rows for key in row))
