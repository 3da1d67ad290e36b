"""A helper that starts a cluster that many tests join."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clusters import NONE_IDLE, SPARING, started


@contextmanager
def cluster(engine: str) -> Iterator[dict[str, Any]]:
    """Start a cluster; yield the options to connect with."""
    command = [sys.executable, str(Path(__file__).with_name("clusters.py")), engine]
    with started(engine, command, {**SPARING, **NONE_IDLE}, token="cd" * 32) as (_, options):
        yield options
