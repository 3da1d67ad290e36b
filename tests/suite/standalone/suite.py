"""Role objects outside any worker, independent of executors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import colocate
from colocate import Role, method
from colocate.testing.executors._base import ExecutorCase


class Waiting(Role):
    """A role with an async method."""

    @method
    async def double(self, x: int) -> int:
        """Return the double after yielding to the event loop."""
        await asyncio.sleep(0)
        assert self.ctx.rank == 0
        return 2 * x


class Standalone(ExecutorCase):
    """Role objects answer like a view of one rank."""

    def test_the_function_itself_is_for_role_code(self) -> None:
        """`Class.method(self)` is the plain function in role code; on the driver an error says what to call."""

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
        """A call of an async method inside a running event loop blocks, as in a notebook."""

        async def main() -> list[int]:
            return Waiting().double(2)

        assert asyncio.run(main()) == [4]

    def test_the_other_ways_to_call(self) -> None:
        """`submit` and `keep` work on a role object, and a freed resident raises ClosedError."""
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
