"""A costly resource that examples share until an example fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Reused(Generic[T]):
    """A resource on an exit stack, shared by examples and made anew after one that fails."""

    def __init__(self, make: Callable[[ExitStack], T]) -> None:
        self._make = make
        self._made: tuple[T] | None = None
        self._stack = ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[T]:
        if self._made is None:
            self._made = (self._make(self._stack),)
        try:
            yield self._made[0]
        except BaseException:
            self._made = None
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
