import colocate


class Slow:
    """A class that isn't a subclass of Executor."""


@colocate.hookimpl
def colocate_executor() -> type:
    return Slow
