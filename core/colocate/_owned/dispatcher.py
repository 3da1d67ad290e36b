"""The runtime's dispatcher: the thread of users' callbacks and observers. The framework depends on it in nothing."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from colocate._system.jobs import JobThread
from colocate._system.limits import TOLD_TOGETHER_S
from colocate.worker.serving.failure import stack_of_role_code


class Dispatcher(JobThread):
    """Runs users' callbacks and observers, one after the other, in the order in which they were given.

    Attributes:
        is_given_up: Tells whether it is kept by one that somebody has waited for in vain, and has said so.
    """

    def __init__(self, name: str) -> None:
        """Args: name: Name of the thread."""
        super().__init__(name, _report)
        self._gathered: deque[Callable[[], object]] = deque()
        self._comes = False  # to what is gathered, soon
        self.is_given_up: Callable[[], bool] = lambda: False
        self.start()

    def soon(self, job: Callable[[], object]) -> None:
        """Run a job as soon as the earlier ones are done; here and now once the thread has ended."""
        self._gathered.append(job)
        super().soon(self._catch_up)

    def gather(self, job: Callable[[], object]) -> None:
        """Run a job within a moment, together with others: waking the thread costs more than most of them."""
        self._gathered.append(job)
        if not self._comes:  # after it was added: see `_catch_up`
            self._comes = True
            self.after(TOLD_TOGETHER_S, self._catch_up)
        if self._ended:
            self._catch_up()

    @property
    def stack(self) -> str:
        """Return what its thread is doing."""
        return "".join(stack_of_role_code(self._thread))

    def _finish(self) -> None:
        super()._finish()
        self._catch_up()

    def _catch_up(self) -> None:
        self._comes = False  # before looking: whoever adds a job after that has this come once more
        while self._gathered:
            try:
                job = self._gathered.popleft()
            except IndexError:  # once the thread has ended, others do this too
                return
            self._run(job)


def _report(error: BaseException) -> None:
    """A callback's error, as Python reports what nobody can catch. It can't end the process, nor the thread."""
    sys.excepthook(type(error), error, error.__traceback__)
