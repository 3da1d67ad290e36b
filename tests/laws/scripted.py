"""A role that follows orders: log, be slow, raise, meet other ranks in a collective."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

import attrs

from colocate import ColocatedGroup, Concat, Gather, Role, method
from colocate._role.context import running_call


class Boom(Exception):
    """The error of a role that was ordered to fail."""


@attrs.frozen
class Order:
    """The script of one call.

    Attributes:
        call: Its number, which is the order of submission.
        fails: The ranks on which it raises.
        late: Whether they raise at its end, after any collective.
        slow: Milliseconds that ranks take first.
    """

    call: int
    fails: Sequence[int] = ()
    late: bool = False
    slow: Mapping[int, int] = attrs.field(factory=dict)


class Cut(ConnectionError):
    """The error on threads in place of gloo's when a peer won't arrive."""


class Meetings:
    """Collectives for workers that are threads; as with gloo, a failed rank ends the waits of other ranks."""

    def __init__(self) -> None:
        self.group: ColocatedGroup | None = None
        self._news = threading.Condition()
        self._there: dict[tuple[str | None, int], int] = {}

    def sum(self, role: str | None, call: int, ranks: int) -> int:
        """Return the sum of the call's number over all ranks; raise Cut when a peer won't arrive."""
        with self._news:
            self._there[role, call] = self._there.get((role, call), 0) + 1
            self._news.notify_all()
            while self._there[role, call] < ranks:
                if self._is_held():
                    raise Cut(call)
                self._news.wait(0.005)  # A hold sends no notification here, so poll.
        return call * ranks

    def _is_held(self) -> bool:
        """Return whether this call or an earlier one has failed, so that missing ranks won't arrive."""
        state = running_call.get()
        assert self.group is not None
        assert state is not None
        hold = self.group._node.order._holds.get("")
        return hold is not None and hold.failed <= state.seq

    def reset(self) -> None:
        """Forget all arrivals: the numbers of calls start again."""
        self._there.clear()


class Scripted(Role):
    """A role whose calls are recorded in its slot's journal, in the order in which they began."""

    def __init__(self, meetings: Meetings | None = None) -> None:
        self.meetings = meetings
        self.journal: list[int] = []

    def _begin(self, order: Order) -> None:
        self.ctx.sibling("all", Scripted).journal.append(order.call)
        time.sleep(order.slow.get(self.ctx.rank, 0) / 1000)
        if not order.late:
            self._fail(order)

    def _fail(self, order: Order) -> None:
        if self.ctx.rank in order.fails:
            raise Boom(order.call, self.ctx.rank)

    @method
    def plain(self, order: Order) -> tuple[int, int]:
        self._begin(order)
        self._fail(order)
        return order.call, self.ctx.rank

    @method(concurrency=2)
    async def overlapping(self, order: Order) -> tuple[int, int]:
        self._begin(order)
        for _ in range(3):
            await asyncio.sleep(0)
        self._fail(order)
        return order.call, self.ctx.rank

    @method
    def meet(self, order: Order) -> int:
        self._begin(order)
        found = self._sum(order)
        self._fail(order)
        return found

    def _sum(self, order: Order) -> int:
        ctx = self.ctx
        if self.meetings is not None:
            return self.meetings.sum(ctx.role, order.call, ctx.world_size)
        import torch
        import torch.distributed as dist

        found = torch.tensor([order.call])
        dist.all_reduce(found, group=ctx.process_group())
        return int(found)

    @method(collect=Concat())
    def make(self, order: Order) -> list[int]:
        self._begin(order)
        self._fail(order)
        return [order.call, self.ctx.rank]

    @method
    def use(self, order: Order, x: list[int]) -> list[int]:
        self._begin(order)
        self._fail(order)
        return x

    @method(collect=Gather())
    def read(self) -> list[int]:
        """Return the journal so far, and start a new one."""
        found, self.journal = self.journal, []
        return found
