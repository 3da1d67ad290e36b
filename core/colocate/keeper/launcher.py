"""The thread that starts worker processes: the kernel ties their lives to it, so it lives as long as they may."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from colocate.wire.lane import report_exception


class Launcher:
    """Runs jobs one after the other on a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="colocate-launcher", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on the thread, and wait for it."""
        done = threading.Event()
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                job()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.soon(guarded)
        done.wait()
        if errors:
            raise errors[0]

    def soon(self, job: Callable[[], None]) -> None:
        """Run a job on the thread after those before it."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after what is queued."""
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the workers that it has started would end with this thread
                report_exception()
            del job
