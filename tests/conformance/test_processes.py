from tests.suite.whole import ExecutorSuite


class TestProcesses(ExecutorSuite):
    """Slots are processes of this machine."""

    options = {"processes": True}
