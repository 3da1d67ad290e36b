"""`Here`: a thread and task, so that what one of them has opened isn't taken for another's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs

from colocate._system.imported import imported

if TYPE_CHECKING:
    import asyncio


def _task() -> asyncio.Task[Any] | None:
    module = imported("asyncio")  # there are no tasks without it, nor while another thread is about to import it
    loop = None if module is None else module._get_running_loop()
    return None if loop is None or module is None else module.current_task(loop)


@attrs.frozen(eq=False)
class Here:
    """Where it was made. A context variable alone doesn't tell: a task has those of the one that has started it."""

    thread: int = attrs.field(factory=threading.get_ident, init=False)
    _task: asyncio.Task[Any] | None = attrs.field(factory=_task, init=False)

    @property
    def is_current(self) -> bool:
        """Whether it is this thread and task."""
        return self.is_current_thread and self._task is _task()

    @property
    def is_current_thread(self) -> bool:
        """Whether it is this thread, in whichever task."""
        return self.thread == threading.get_ident()
