from colocate.testing.executors import ExecutorSuite


class TestStrict(ExecutorSuite):
    """Slots are threads, and everything goes through the wire format."""

    options = {"strict": True}
