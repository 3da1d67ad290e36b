"""A role object outside any worker, which no executor has a part in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import colocate
from colocate import Role, method
from colocate.testing.executors._base import ExecutorCase


class Waiting(Role):
    """Has an async method."""

    @method
    async def double(self, x: int) -> int:
        """Wait a moment."""
        await asyncio.sleep(0)
        assert self.ctx.rank == 0
        return 2 * x


class Standalone(ExecutorCase):
    """Role objects answer as a view of one rank."""

    def test_the_function_itself_is_for_role_code(self) -> None:
        """`Class.method(self)` is the plain function in a role's own code; a driver is told what to call."""

        class Twice(Waiting):
            @method
            async def double(self, x: int) -> int:
                half: int = await Waiting.double(self, x)
                return 2 * half

        assert Twice().double(2) == [8]
        with pytest.raises(
            TypeError, match=r"Waiting.double\(...\) on the class .*; call double on a view or an object"
        ):
            Waiting.double(Waiting(), 2)

    def test_async_methods_inside_a_running_loop(self) -> None:
        """As in a notebook: the call blocks there, as any call does."""

        async def main() -> list[int]:
            return Waiting().double(2)

        assert asyncio.run(main()) == [4]

    def test_the_other_ways_to_call(self) -> None:
        """A kept value is there until it is freed."""
        double: Any = Waiting().double
        assert double.submit(3).result() == [6]
        resident = double.keep(3)
        assert resident.fetch() == [6]
        resident.wait(1.0)
        resident.free()
        for use in (resident.wait, resident.fetch):
            with pytest.raises(colocate.ClosedError, match="was freed"):
                use()


AREAS = [Standalone]
