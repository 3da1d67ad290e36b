from collections.abc import Sequence

import colocate
from colocate.executor import Executor, Node


class Nameless(Executor):
    """An executor without a name."""


class Unfinished(Executor):
    """An executor with one of the required methods."""

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
