"""Write `report.html`, a page that shows a finished run and needs no network, scripts or other files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colocate_report.record import RunRecord

__all__ = ["write"]


def write(directory: Path, record: RunRecord, *, error: str | None = None) -> Path:
    """Write a run's report.

    Args:
        directory: The folder for `report.html`; an existing page is replaced atomically.
        record: The run.
        error: The error that ended the run early; None for a good end.

    Returns:
        The page's path.
    """
    # Imported here, because `colocate.driver` imports all of core, which a list of running jobs doesn't need.
    from colocate.driver import write_atomically
    from colocate_report.page import render_page

    path = directory / "report.html"
    write_atomically(path, render_page(record, error))
    return path
