"""`report.html`: one page that shows a finished run. It needs no network, no script and no other file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colocate_report.record import RunRecord

__all__ = ["write"]


def write(directory: Path, record: RunRecord, *, error: str | None = None) -> Path:
    """Write a run's page.

    Args:
        directory: The folder that gets `report.html`; a page that is there is replaced, all of it or nothing.
        record: What the page shows.
        error: What ended the run before its time; None when nothing failed.

    Returns:
        The page's path.
    """
    from colocate.driver import write_whole  # which needs all of core, as those don't who only ask which jobs run
    from colocate_report.page import render

    path = directory / "report.html"
    write_whole(path, render(record, error))
    return path
