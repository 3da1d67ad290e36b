"""Code that runs step by step, as coroutines do, each step in a block: others run between them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

T = TypeVar("T")

own_block: ContextVar[Callable[[], AbstractContextManager[object]] | None] = ContextVar("own_block", default=None)
"""Makes what each step of a task is in that the code which runs makes, of how things are then."""


class Steps(Coroutine[Any, Any, T]):
    """A coroutine each of whose steps is in a block.

    Attributes:
        coroutine: It.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], block: AbstractContextManager[object]) -> None:
        """Args: coroutine: It. block: What is entered before each step and left after it."""
        self.coroutine = coroutine
        self._block = block

    def send(self, value: Any) -> Any:
        """Take a step."""
        with self._block:
            return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Take one in which what it waits for raises."""
        with self._block:
            return self.coroutine.throw(*error)

    def close(self) -> None:
        """Take the last one, in which it is closed."""
        with self._block:
            self.coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coroutine, name)  # its name, its frame ...: who looks at it sees the coroutine

    def __next__(self) -> Any:
        return self.send(None)

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self)  # which it is but for its type
