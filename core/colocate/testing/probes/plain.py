"""Roles on plain Python values: who runs where, how rows travel, in which order calls run."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs

import colocate
from colocate import Broadcast, Concat, First, Gather, OnRank, PerRank, Reduce, Role, Scatter, method
from colocate.testing.gate import Address, is_open, pass_gate, pass_gate_async


class Tracked(list[int]):
    """A list that can be referred to weakly."""


class Echo(Role):
    """Says who it is and gives back what it gets."""

    def __init__(self, tag: str = "echo", *, extra: Any = None) -> None:
        self.tag = tag
        self.extra = extra
        self.rank_in_constructor = self.ctx.rank
        self.seen: Callable[[], Tracked | None] = lambda: None

    @method
    def noop(self) -> None:
        """Do nothing."""

    @method
    def echo(self, value: Any) -> Any:
        """Give back what it gets."""
        return value

    @method(collect=First())
    def first(self, value: Any) -> Any:
        """Give back what it gets, from one rank."""
        return value

    @method
    def made_with(self) -> tuple[str, Any, int]:
        """What the constructor got, and the rank that it saw."""
        return self.tag, self.extra, self.rank_in_constructor

    @method
    def who(self) -> dict[str, Any]:
        """The plain facts of the context."""
        ctx = self.ctx
        return {
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "slot": ctx.slot,
            "node": ctx.node,
            "role": ctx.role,
            "group": ctx.group,
            "generation": ctx.generation,
            "same": colocate.context() is ctx,
        }

    @method
    def place(self) -> tuple[int, int, bool]:
        """Process, thread, and whether that is the main one."""
        return os.getpid(), threading.get_ident(), threading.current_thread() is threading.main_thread()

    @method
    def env(self, name: str) -> str | None:
        """An environment variable."""
        return os.environ.get(name)

    @method
    def ask_sibling(self, name: str) -> tuple[str, int]:
        """What another role of this worker says: called bare."""
        said: Any = self.ctx.sibling(name, Echo).tag_and_rank()  # bare, where a view would give a list
        return said[0], said[1]

    @method
    def tag_and_rank(self) -> tuple[str, int]:
        """The tag and the rank."""
        return self.tag, self.ctx.rank

    @method
    def bare(self) -> int:
        """Inside a role, a method of its own is the bare method: no list, no dispatch."""
        said: Any = self.tag_and_rank()
        return int(said[1])

    @method
    def from_a_thread(self) -> tuple[int, int]:
        """The rank, as a thread that the role has started sees it."""
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(self.ctx.rank))
        thread.start()
        thread.join()
        return seen[0], self.ctx.rank

    @method(dispatch=OnRank(0))
    def call_a_view(self) -> Any:
        """Call a view from inside a worker, of a group of the role's own."""
        with colocate.connect("local") as runtime, runtime.reserve() as pool:
            return pool.spawn({"inner": colocate.role(Echo)}).role("inner", Echo).echo(1)

    @method
    def tracked(self, gate: Address | None = None) -> Tracked:
        """Something whose end is noticed: then somebody comes to the gate."""
        made = Tracked([1])
        self.seen = weakref.ref(made)
        if gate is not None:
            weakref.finalize(made, is_open, gate).atexit = False
        return made

    @method
    def is_alive(self) -> bool:
        """Whether what `tracked` returned last is still there."""
        return self.seen() is not None

    @method
    def progress_at(self, gate: Address, done: int, total: int) -> None:
        """Say how far it is, and wait."""
        self.ctx.progress(done, total)
        pass_gate(gate)


class Rows(Role):
    """Every dispatch and collect, on lists of numbers."""

    @method(dispatch=Scatter("batch"), collect=Concat())
    def double(self, batch: list[int]) -> list[int]:
        """Twice each row."""
        return [2 * row for row in batch]

    @method(dispatch=Scatter("batch"), collect=Gather())
    def seen(self, batch: Any, factor: int = 1) -> Any:
        """What each rank gets."""
        return batch, factor

    @method(dispatch=Scatter("left", "right"), collect=Concat())
    def zipped(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        """Rows that go together."""
        return list(zip(left, right, strict=True))

    @method(dispatch=Scatter("batch", pad=True), collect=Concat())
    def padded(self, batch: list[int]) -> list[tuple[int, int]]:
        """Each row, and how many rows this rank got."""
        return [(row, len(batch)) for row in batch]

    @method(dispatch=Scatter("batch", pad="masked"), collect=Gather())
    def masked(self, batch: list[int]) -> tuple[list[int], int | None]:
        """What each rank gets, and how much of it is real."""
        return batch, self.ctx.valid_rows

    @method(dispatch=Scatter("batch", empty="run"), collect=Gather())
    def maybe_empty(self, batch: list[int]) -> tuple[list[int], int | None]:
        """Runs on ranks without rows too."""
        return batch, self.ctx.valid_rows

    @method(dispatch=Scatter("batch", empty="run"), collect=Concat())
    def keep_rows(self, batch: list[int]) -> list[int]:
        """The rows, on ranks without any too."""
        return list(batch)

    @method(dispatch=PerRank("item"), collect=Gather())
    def each(self, item: Any, shared: Any = None) -> tuple[int, Any, Any]:
        """Item i on rank i."""
        return self.ctx.rank, item, shared

    @method(dispatch=OnRank(1))
    def on_one(self, value: Any) -> tuple[int, Any]:
        """On one rank alone."""
        return self.ctx.rank, value

    @method(dispatch=Scatter("batch", empty="run"), collect=Reduce("mean"))
    def mean(self, batch: list[float]) -> dict[str, float]:
        """The mean of the rows; NaN on a rank without any, which doesn't count."""
        return {"mean": sum(batch) / len(batch) if batch else float("nan")}

    @method(dispatch=Scatter("batch"), collect=Reduce("mean", weight=None))
    def unweighted(self, batch: list[float]) -> float:
        """The mean of the ranks' means."""
        return sum(batch) / len(batch)

    @method(dispatch=Scatter("batch"), collect=Reduce("sum"))
    def total(self, batch: list[int]) -> dict[str, int]:
        """The sum, leaf by leaf."""
        return {"sum": sum(batch), "count": len(batch)}

    @method(collect=Reduce("max"))
    def highest(self) -> int:
        """The highest rank."""
        return self.ctx.rank

    @method(collect=Reduce("min"))
    def lowest(self) -> int:
        """The lowest rank."""
        return self.ctx.rank

    @method(dispatch=Broadcast(), collect=Concat())
    def produce(self, count: int) -> list[int]:
        """So many rows on each rank, all different."""
        return [100 * self.ctx.rank + index for index in range(count)]

    @method(dispatch=PerRank("count"), collect=Concat())
    def produce_each(self, count: int) -> list[int]:
        """As `produce`, with a number for each rank."""
        return [100 * self.ctx.rank + index for index in range(count)]

    @method(collect=Concat())
    def no_rows(self) -> int:
        """Something that Concat can't join."""
        return self.ctx.rank


class Log(Role):
    """Remembers what ran, in which order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.event: asyncio.Event | None = None

    @method
    def add(self, entry: Any) -> None:
        """Remember something."""
        self.entries.append(entry)

    @method
    def read(self) -> list[Any]:
        """What has been remembered."""
        return list(self.entries)

    @method
    def clear(self) -> None:
        """Forget it."""
        self.entries.clear()
        self.event = None

    @method
    def add_at(self, gate: Address, entry: Any) -> None:
        """Wait, then remember."""
        pass_gate(gate)
        self.entries.append(entry)

    @method
    def add_and_look(self, gate: Address, entry: Any) -> bool:
        """Remember; whether a gate had been opened before this began."""
        was_open = is_open(gate)
        self.entries.append(entry)
        return was_open

    @method(dispatch=PerRank("gate", "then"))
    def at(self, gate: Address | None, then: str, entry: Any = None) -> Any:
        """Each rank with a gate waits there; then it raises, or remembers an entry."""
        if gate is not None:
            pass_gate(gate)
        if then == "raise":
            raise ValueError(f"rank {self.ctx.rank} was told to raise")
        self.entries.append(entry)
        return entry

    @method
    async def async_add(self, entry: Any, gate: Address | None = None) -> None:
        """Begin, wait, end; one at a time."""
        self.entries.append(f"begin {entry}")
        if gate is not None:
            await pass_gate_async(gate)
        self.entries.append(f"end {entry}")

    @method(concurrency=2)
    async def meet(self, entry: Any) -> str:
        """Wait for the other of two: ends only if both overlap."""
        self.entries.append(entry)
        if self.event is None:
            self.event = asyncio.Event()
            await self.event.wait()
            return "waited"
        self.event.set()
        self.event = None
        return "woke the other"

    @method(concurrency=2)
    async def peak(self, gate: Address) -> None:
        """Counts how many overlap."""
        self.entries.append("in")
        await pass_gate_async(gate)
        self.entries.append("out")

    @method
    async def async_raise(self) -> None:
        """Fail after a while."""
        await asyncio.sleep(0)
        raise LookupError("async failure")

    @method(dispatch=Scatter("batch"), concurrency=2)
    async def async_rows(self, batch: list[int]) -> tuple[list[int], int | None, int]:
        """What an async method sees of its context after waiting."""
        await asyncio.sleep(0)
        return batch, self.ctx.valid_rows, colocate.context().rank

    @method(dispatch=PerRank("gate"))
    def cancelled_at(self, gate: Address, failing: int | None) -> bool:
        """Wait; one rank raises then; whether somebody still wants the others' results."""
        pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} was told to raise")
        self.entries.append(("cancelled", self.ctx.cancelled))
        return self.ctx.cancelled

    @method
    def look_until_cancelled(self, gate: Address) -> str:
        """Pass a gate, then work until nobody wants the result."""
        pass_gate(gate)
        pause = threading.Event()
        while not self.ctx.cancelled:
            pause.wait(0.002)
        return "cancelled"


class Axes(Role):
    """Where the ranks lie in a mesh, and what reaches them there."""

    @method
    def coordinates(self, *axes: str) -> list[tuple[int, int]]:
        """(rank, size) along each axis."""
        return [(self.ctx.mesh.rank(axis), self.ctx.mesh.size(axis)) for axis in axes]

    @method(dispatch=Scatter("batch"), collect=Gather())
    def seen(self, batch: list[int]) -> list[int]:
        """What each rank gets of a batch spread over dp."""
        return batch

    @method(dispatch=Scatter("batch", axis="tp"), collect=Gather())
    def seen_along_tp(self, batch: list[int]) -> list[int]:
        """What each rank gets of a batch spread over tp."""
        return batch

    @method(dispatch=Scatter("batch"), collect=Concat())
    def tagged(self, batch: list[int]) -> list[tuple[int, int]]:
        """The rows with the rank whose copy was taken."""
        return [(row, self.ctx.rank) for row in batch]

    @method(dispatch=Scatter("batch"), collect=Reduce("sum"))
    def count(self, batch: list[int]) -> int:
        """Rows, each counted once."""
        return len(batch)

    @method(dispatch=Scatter("batch"), collect=First())
    def first_rank(self, batch: list[int]) -> int:
        """The rank whose result counts."""
        return self.ctx.rank


@attrs.frozen
class Swap(colocate.Dispatch):
    """A dispatch of a user's own: rank i gets the arguments with `to` set to the rank counted from the end."""

    def split(self, arguments: Any, ranks: colocate.Ranks) -> list[dict[str, Any]]:
        """One mapping per rank."""
        return [{**arguments, "to": ranks.world_size - 1 - rank} for rank in range(ranks.world_size)]


@attrs.frozen
class ByRank(colocate.Collect):
    """A collect of a user's own: a dict by rank."""

    def join(self, results: Any, ranks: colocate.Ranks) -> dict[int, Any]:
        """The results by rank."""
        return dict(enumerate(results))


class Own(Role):
    """A dispatch and a collect of a user's own, and all that Python's signatures allow."""

    @method(dispatch=Swap(), collect=ByRank())
    def swapped(self, to: int = -1) -> tuple[int, int]:
        """Rank and what it was given."""
        return self.ctx.rank, to

    @method(collect=First())
    def signature(self, a: int, /, b: int = 2, *rest: int, c: int, **others: int) -> Any:
        """Every kind of parameter."""
        return a, b, rest, c, others


class Plain:
    """A role that knows nothing of colocate's base class."""

    def __init__(self, start: int) -> None:
        self.start = start + colocate.context().rank

    @method(collect=Gather())
    def value(self) -> int:
        """Start plus rank."""
        return self.start

    def undecorated(self) -> None:
        """Not for views."""
