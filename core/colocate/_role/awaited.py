"""Run coroutines from synchronous code."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine. A running event loop, such as a notebook's, is blocked in the meantime."""
    # Imported late, because the import takes a tenth of a driver's start, and most drivers have no coroutines.
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # `asyncio.run` would unset the thread's current asyncio event loop, which role code may have set.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    with ThreadPoolExecutor(1, "colocate-standalone") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()
