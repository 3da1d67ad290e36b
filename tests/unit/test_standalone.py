"""A role object outside any worker."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import pytest

import colocate
from colocate import First, Role, method
from colocate.errors import ConfigError


class Waiting(Role):
    @method
    async def double(self, x: int) -> int:
        await asyncio.sleep(0)
        assert self.ctx.rank == 0
        return 2 * x


def test_the_function_itself_is_for_role_code() -> None:
    """`Class.method(self)` is the plain function in a role's own code; a driver that calls it is told what to call."""

    class Twice(Waiting):
        @method
        async def double(self, x: int) -> int:
            half: int = await Waiting.double(self, x)
            return 2 * half

    assert Twice().double(2) == [8]
    with pytest.raises(TypeError, match=r"Waiting.double\(...\) on the class .*; call double on a view or an object"):
        Waiting.double(Waiting(), 2)


def test_async_methods_inside_a_running_loop() -> None:
    """As in a notebook: the call blocks there, as any call does."""

    async def main() -> list[int]:
        return Waiting().double(2)

    assert asyncio.run(main()) == [4]


T = TypeVar("T")


class Box(Role, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @method(collect=First())
    def get(self) -> T:
        return self.value

    @method(collect=First())
    def beside(self) -> T:
        return self.ctx.sibling("box", Box[T]).value


def test_classes_with_type_arguments() -> None:
    """`Box[int]` is for type checkers: it stands wherever the class may."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"box": colocate.role(Box[int], 3)})
        assert group.role("box", Box[int]).get() == group[Box[int]].get() == group[Box].beside() == 3
        with pytest.raises(ConfigError, match="is a Box, not a Waiting"):
            group.role("box", Waiting)


def test_the_other_ways_to_call() -> None:
    """A kept value is there until it is freed."""
    double: Any = Waiting().double
    assert double.submit(3).result() == [6]
    kept = double.keep(3)
    assert kept.fetch() == [6]
    kept.wait(1.0)
    kept.free()
    for use in (kept.wait, kept.fetch):
        with pytest.raises(colocate.ClosedError, match="was freed"):
            use()
