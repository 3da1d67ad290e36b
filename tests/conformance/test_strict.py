from tests.suite.whole import Executor


class TestStrict(Executor):
    """Slots are threads, and everything goes through the wire format."""

    options = {"strict": True}
