import colocate


class Slow:
    """Not a subclass of Executor."""


@colocate.hookimpl
def colocate_executor() -> type:
    return Slow
