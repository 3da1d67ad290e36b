"""The runtime's dispatcher: a thread for users' callbacks and observers. The framework doesn't need the thread."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from colocate._system.jobs import JobThread
from colocate._system.limits import TOLD_TOGETHER_S
from colocate.worker.serving.failure import stack_of_role_code


class Dispatcher(JobThread):
    """A thread that runs users' callbacks and observers, one after the other, in order.

    Attributes:
        is_given_up: Returns whether a hanging observer blocks the thread, and the wait for that was given up.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _report)
        self._gathered: deque[Callable[[], object]] = deque()
        self._comes = False  # True while a call of `_catch_up` is scheduled.
        self.is_given_up: Callable[[], bool] = lambda: False
        self.start()

    def soon(self, job: Callable[[], object]) -> None:
        """Queue a job after all earlier jobs; run the job at once if the thread has ended."""
        self._gathered.append(job)
        super().soon(self._catch_up)

    def gather(self, job: Callable[[], object]) -> None:
        """Queue a job for the next batch, because waking the thread for each job costs more than most jobs."""
        self._gathered.append(job)
        if not self._comes:  # Check this after the append, because `_catch_up` resets the mark before taking jobs.
            self._comes = True
            self.after(TOLD_TOGETHER_S, self._catch_up)
        if self._ended:
            self._catch_up()

    @property
    def stack(self) -> str:
        return "".join(stack_of_role_code(self._thread))

    def _finish(self) -> None:
        super()._finish()
        self._catch_up()

    def _catch_up(self) -> None:
        self._comes = False  # Reset this first, so that a job that is added later schedules another catch-up.
        while self._gathered:
            try:
                job = self._gathered.popleft()
            except IndexError:  # Another thread may have taken the last job.
                return
            self._run(job)


def _report(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)
