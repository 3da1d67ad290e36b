"""The runtime's dispatcher: a thread for users' callbacks and observers, but for no work of the framework itself."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from colocate._system.jobs import JobThread
from colocate._system.limits import TOLD_TOGETHER_S
from colocate.worker.serving.failure import format_role_stack


class Dispatcher(JobThread):
    """A thread that runs users' callbacks and observers, one after the other, in order.

    Attributes:
        is_given_up: Returns whether a hanging observer blocks the thread, and the wait for that was given up.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _report)
        self._gathered: deque[Callable[[], object]] = deque()
        self._is_scheduled = False  # True while a call of `_run_gathered` is scheduled.
        self.is_given_up: Callable[[], bool] = lambda: False
        self.start()

    def call_soon(self, job: Callable[[], object]) -> None:
        """Queue a job after all earlier jobs; run the job at once if the thread has ended."""
        self._gathered.append(job)
        super().call_soon(self._run_gathered)

    def call_batched(self, job: Callable[[], object]) -> None:
        """Queue a job for the next batch, because waking the thread for each job costs more than most jobs."""
        self._gathered.append(job)
        if (
            not self._is_scheduled
        ):  # Check this after the append, because `_run_gathered` resets the flag before taking jobs.
            self._is_scheduled = True
            self.call_later(TOLD_TOGETHER_S, self._run_gathered)
        if self._ended:
            self._run_gathered()

    @property
    def stack(self) -> str:
        return "".join(format_role_stack(self._thread))

    def _finish(self) -> None:
        super()._finish()
        self._run_gathered()

    def _run_gathered(self) -> None:
        self._is_scheduled = False  # Reset this before taking jobs, so that a job added meanwhile schedules a new run.
        while self._gathered:
            try:
                job = self._gathered.popleft()
            except IndexError:  # Another thread may have taken the last job.
                return
            self._run_reporting(job)


def _report(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)
