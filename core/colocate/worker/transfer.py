"""A thread that waits for residents and sends them, so that the lane never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Transfer:
    """Runs jobs in order on one thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread after the jobs that are queued."""
        self._jobs.put(None)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
