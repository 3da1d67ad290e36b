"""What Ray runs in a worker process before an actor: it begins and doesn't end on a node that is about to go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

FOLDER = "GOING"
"""The environment's variable that names a folder, in which files named by raylets' pids say which node it is."""


def where_told() -> None:
    told = Path(os.environ[FOLDER], str(os.getppid()))
    if told.exists():
        told.rename(told.with_suffix(".begun"))
        signal.pause()
