"""Identify the current thread and task (`ThreadTask`), so that a block of one task doesn't affect other tasks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs

from colocate._system.imported import find_imported

if TYPE_CHECKING:
    import asyncio


def _get_task() -> asyncio.Task[Any] | None:
    # There is no task if asyncio isn't imported, or is just being imported by another thread.
    module = find_imported("asyncio")
    loop = None if module is None else module._get_running_loop()
    return None if loop is None or module is None else module.current_task(loop)


@attrs.frozen(eq=False)
class ThreadTask:
    """The thread and task that created this object. A context variable isn't enough, because new tasks inherit it."""

    thread: int = attrs.field(factory=threading.get_ident, init=False)
    _task: asyncio.Task[Any] | None = attrs.field(factory=_get_task, init=False)

    @property
    def is_current(self) -> bool:
        return self.is_current_thread and self._task is _get_task()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the thread that created this object, in any task."""
        return self.thread == threading.get_ident()
