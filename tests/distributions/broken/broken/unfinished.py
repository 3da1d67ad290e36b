from collections.abc import Sequence

import colocate
from colocate.executor import Executor, Node


class Nameless(Executor):
    """It doesn't say what it is called."""


class Unfinished(Executor):
    """It has one of its duties."""

    name = "unfinished"

    def nodes(self) -> Sequence[Node]:
        return ()


class _Brings:
    def __init__(self, executor: type[Executor]) -> None:
        self.executor = executor

    @colocate.hookimpl
    def colocate_executor(self) -> type[Executor]:
        return self.executor


nameless, unfinished = _Brings(Nameless), _Brings(Unfinished)
