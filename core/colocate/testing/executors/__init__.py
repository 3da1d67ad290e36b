"""The suite that an executor passes. Subclass it in a test file of your own:

    from colocate.testing.executors import ExecutorSuite

    class TestMine(ExecutorSuite):
        executor = "mine"
        options = {"address": "…"}

Each area is a class of its own too (`Calls`, `Residents` …), for a start with less than everything. What the executor
lacks a capability for is skipped with the capability's name; what needs torch is skipped where it isn't installed.
"""

from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.executors.calls import Calls


class ExecutorSuite(Calls):
    """Everything that holds for every executor."""


__all__ = ["Calls", "ExecutorCase", "ExecutorSuite", "Spawn", "needs"]
