"""Closing what may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from colocate.testing.waiting import PATIENCE_S


def ended(close: Callable[..., None], **options: Any) -> list[str]:
    """Close something; what has gone wrong, in words. Fails if it doesn't end."""
    wrong: list[str] = []

    def run() -> None:
        try:
            close(**options)
        except BaseExceptionGroup as group:
            wrong.extend(map(str, group.exceptions))

    closer = threading.Thread(target=run, daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive(), "the close doesn't end"
    return wrong
