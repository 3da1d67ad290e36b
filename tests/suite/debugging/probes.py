"""A role that stops."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from colocate import Role, method
from colocate.testing.gate import Address, pass_gate


class _Value:
    """Something whose end can be seen."""


class Stopper(Role):
    """Stops on some ranks, and goes on."""

    def __init__(self, stops: bool = False, fails: Sequence[int] = ()) -> None:
        if stops and self.ctx.rank == 0:
            breakpoint()
        if self.ctx.rank in fails:
            raise LookupError("the constructor")

    @method
    def step(self, value: int, ranks: Sequence[int] = (1,)) -> int:
        total = value + self.ctx.rank
        if self.ctx.rank in ranks:
            breakpoint()
        total += 10
        return self.add_more(total)

    def add_more(self, value: int) -> int:
        return value + 100

    @method
    def keep(self) -> None:
        value = _Value()
        self.value = weakref.ref(value)
        if self.ctx.rank == 1:
            breakpoint()
        assert value is not None

    @method
    def is_kept(self) -> bool:
        return self.value() is not None

    @method
    async def step_async(self, value: int) -> int:
        if self.ctx.rank == 1:
            breakpoint()
        await asyncio.sleep(0.001)
        value += 1
        return value

    @method
    def all_together(self, gate: Address) -> tuple[int, bool]:
        for _ in range(2):
            breakpoint()
        pass_gate(gate)
        return self.ctx.rank, self.ctx.cancelled

    @method
    def stop_often(self, count: int) -> int:
        for number in range(count):
            if self.ctx.rank == 1:
                breakpoint()
            assert number < count
        return self.ctx.rank

    @method
    def sleep_after(self, seconds: float) -> int:
        if self.ctx.rank == 1:
            breakpoint()
        time.sleep(seconds)
        return self.ctx.rank

    @method
    def fail(self, ranks: Sequence[int]) -> int:
        cause = {"in": self.ctx.rank}
        if self.ctx.rank in ranks:
            raise LookupError(cause["in"])
        return self.ctx.rank

    @method
    def fork(self) -> str:
        if self.ctx.rank == 0:
            return ""
        read_end, write_end = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                breakpoint()
                os.write(write_end, b"went on")
            except RuntimeError as error:
                os.write(write_end, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write_end)
        with open(read_end) as file:
            return file.read()

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def sum(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        if self.ctx.rank == 1:
            breakpoint()
        total: Any = torch.tensor(value)
        dist.all_reduce(total, group=self.ctx.process_group())
        return float(total)
