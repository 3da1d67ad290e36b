"""The rows of the table, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

Verdict = Literal["PASS", "over", ""]


@frozen
class Row:
    part: str  # the table's section
    name: str  # the measured quantity
    value: float
    unit: str  # its unit; "x" for a ratio
    bar: float | None = None  # the largest allowed value; None for a comparison

    @property
    def verdict(self) -> Verdict:
        """Return "PASS" within the bar, "over" beyond it, or an empty text without a bar."""
        if self.bar is None:
            return ""
        return "PASS" if self.value <= self.bar else "over"

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("what", "measured", "bar", "", caption="medians of the least disturbed round; ratios side by side")
    for column in (1, 2):
        table.columns[column].justify = "right"
    part = None
    for row in rows:
        if row.part != part:
            part = row.part
            table.add_section()
            table.add_row(f"[bold]{part}[/bold]")
        colour = {"PASS": "green", "over": "red", "": "default"}[row.verdict]
        bar = "" if row.bar is None else f"<= {_shown(row.bar, row.unit)}"
        table.add_row(row.name, _shown(row.value, row.unit), bar, f"[{colour}]{row.verdict}[/{colour}]")
    console.print(table)


def _shown(value: float, unit: str) -> str:
    digits = 0 if value == int(value) or abs(value) >= 100 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {unit}"
