from colocate.testing.executors import ExecutorSuite


class TestThreads(ExecutorSuite):
    """Slots are threads of this process."""
