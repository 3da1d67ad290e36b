"""A close with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from colocate.testing.waiting import PATIENCE_S


def ended(close: Callable[..., None], **options: Any) -> list[str]:
    """Call `close` with a time limit; return the messages of the errors in the raised group."""
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
