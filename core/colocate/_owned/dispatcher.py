"""The runtime's dispatcher: the thread of users' callbacks and observers. The framework depends on it in nothing."""

from __future__ import annotations

import sys

from colocate._system.jobs import JobThread
from colocate.worker.failure import stack_of_role_code


class Dispatcher(JobThread):
    """Runs users' callbacks and observers, one after the other."""

    def __init__(self, name: str) -> None:
        """Args: name: Name of the thread."""
        super().__init__(name, _report)
        self.start()

    @property
    def stack(self) -> str:
        """What its thread is doing."""
        return "".join(stack_of_role_code(self._thread))


def _report(error: BaseException) -> None:
    """A callback's error, as Python reports what nobody can catch. It can't end the process, nor the thread."""
    sys.excepthook(type(error), error, error.__traceback__)
