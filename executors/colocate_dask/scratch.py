"""The scratch folders of private Dask clusters, and the search for leftover folders. Imports no Dask."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from colocate.executor import Running

PREFIX = "colocate-dask-"
_MADE_WITHIN_S = 60.0


def find_leftovers() -> list[Running]:
    """List scratch folders of private clusters whose driver died before removing the folder."""
    folders = []
    for entry in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            since = entry.stat().st_mtime
        except FileNotFoundError:
            continue
        if time.time() - since > _MADE_WITHIN_S:
            folders.append(Running("folder", str(entry), since=since, detail="of a private Dask cluster"))
    return folders
