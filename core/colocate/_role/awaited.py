"""What a coroutine returns, for code that isn't one."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; also where a loop runs already, as in a notebook, which then waits."""
    import asyncio  # takes a tenth of a driver's start, and most have none

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # Not `asyncio.run`, after which this thread would have no current loop: that is role code's.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    with ThreadPoolExecutor(1, "colocate-standalone") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()
