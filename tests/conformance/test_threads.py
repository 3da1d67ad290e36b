from tests.suite.whole import ExecutorSuite


class TestThreads(ExecutorSuite):
    """Slots are threads of this process."""
