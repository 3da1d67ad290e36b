"""Roles whose operations take known times. Each needs torch."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from colocate import PerRank, Role, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


class Timed(Role):
    """A role that computes, sleeps and joins collectives, each rank after its own delay."""

    def __init__(self) -> None:
        self.values = torch.ones(8)

    @method(dispatch=PerRank("seconds"))
    def work(self, seconds: Any) -> None:
        time.sleep(seconds)

    @method(dispatch=PerRank("late"))
    def reduce(self, late: Any) -> None:
        time.sleep(late)
        torch.distributed.all_reduce(self.values, group=self.ctx.process_group())

    @method(dispatch=PerRank("late"))
    def overlap(self, late: Any) -> None:
        """Start a reduction after a delay, work for half a second, then wait for the reduction."""
        time.sleep(late)
        work = torch.distributed.all_reduce(self.values, group=self.ctx.process_group(), async_op=True)
        time.sleep(0.5)
        assert work is not None
        work.wait()

    @method(dispatch=PerRank("late"))
    def step(self, late: Any) -> None:
        """Run a backward pass of DDP, to which a rank may be late."""
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(64, 64), process_group=self.ctx.process_group()
        )
        loss = model(torch.ones(4, 64)).sum()
        time.sleep(late)
        loss.backward()

    @method(dispatch=PerRank("late"))
    def pass_on(self, late: Any) -> None:
        """Send from rank 0 to rank 1."""
        time.sleep(late)
        group = self.ctx.process_group()
        if self.ctx.rank == 0:
            torch.distributed.send(self.values, group=group, group_dst=1)
        else:
            torch.distributed.recv(self.values, group=group, group_src=0)

    @method
    def multiply(self) -> None:
        self.values = torch.mm(self.values.reshape(2, 4), self.values.reshape(4, 2)).repeat(2, 1).reshape(8) * 0 + 1

    @method(concurrency=3)
    async def wait(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    @method
    def write_late(self, gate: Address) -> None:
        """Delay the next profile of the second rank until the gate is open."""
        from colocate.features.profiling.worker import Session

        written = Session.write_trace

        def late(*args: Any) -> Any:
            Session.write_trace = written  # type: ignore[method-assign]
            pass_gate(gate)
            return written(*args)

        if self.ctx.rank == 1:
            Session.write_trace = late  # type: ignore[method-assign, assignment]

    @method
    def refuse_next(self) -> None:
        """Make the next profile of the second rank fail to start, as if torch ran another one."""
        from colocate.features.profiling.worker import Session

        begin = Session.start_profiler

        def refuse(session: Session) -> None:
            Session.start_profiler = begin  # type: ignore[method-assign]
            raise RuntimeError("another one goes on")

        if self.ctx.rank == 1:
            Session.start_profiler = refuse  # type: ignore[method-assign, assignment]

    @method
    def hooks(self) -> int:
        """Return the number of profiling hooks around this worker's calls."""
        from colocate.worker.context import WorkerContext

        contexts = [context for context in gc.get_objects() if isinstance(context, WorkerContext)]
        hooks = [hook for context in contexts for hook in (*context.before_call_hooks, *context.after_call_hooks)]
        return sum("profiling" in str(getattr(hook, "__module__", "")) for hook in hooks)

    @method
    def patched(self) -> bool:
        """Return whether torch's functions are patched by the profiling feature."""
        return "profiling" in str(getattr(torch.distributed.Work.wait, "__module__", ""))


class ShiftedTimed(Timed):
    """A role whose clock on the second rank differs from the driver's."""

    def __init__(self, by: float) -> None:
        super().__init__()
        if self.ctx.rank == 1:
            now, now_ns = time.time, time.time_ns
            time.time = lambda: now() + by
            time.time_ns = lambda: now_ns() + int(by * 1e9)
