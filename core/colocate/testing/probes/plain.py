"""Roles on plain Python values, for tests of where code runs and in which order calls run."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import colocate
from colocate import First, OnRank, PerRank, Role, method
from colocate.testing.gate import Address, is_open, pass_gate, pass_gate_async


class Tracked(list[int]):
    """A list that supports weak references."""


class Echo(Role):
    """A role that returns its arguments, and facts about itself."""

    def __init__(self, tag: str = "echo", *, extra: Any = None) -> None:
        self.tag = tag
        self.extra = extra
        self.rank_in_constructor = self.ctx.rank
        self.tracked_ref: Callable[[], Tracked | None] = lambda: None

    @method
    def noop(self) -> None:
        """Do nothing."""

    @method
    def echo(self, value: Any) -> Any:
        return value

    @method(collect=First())
    def first(self, value: Any) -> Any:
        return value

    @method
    def who(self) -> dict[str, Any]:
        ctx = self.ctx
        return {
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "slot": ctx.slot,
            "node": ctx.node,
            "role": ctx.role,
            "group": ctx.group,
            "generation": ctx.generation,
            "seed": ctx.seed,
            "same": colocate.context() is ctx,
        }

    @method
    def place(self) -> tuple[int, int, bool]:
        """Return the process id, the thread id, and whether the thread is the main thread."""
        return os.getpid(), threading.get_ident(), threading.current_thread() is threading.main_thread()

    @method
    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    @method
    def ask_sibling(self, name: str) -> tuple[str, int]:
        """Call a method of a sibling role directly, and return the result."""
        answer: Any = self.ctx.sibling(name, Echo).tag_and_rank()  # This direct call returns no list, unlike a view's.
        return answer[0], answer[1]

    @method
    def tag_and_rank(self) -> tuple[str, int]:
        return self.tag, self.ctx.rank

    @method
    def bare(self) -> int:
        """Call a method of this role directly, without dispatch, on the instance and on the class."""
        answer: Any = self.tag_and_rank()
        assert answer == Echo.tag_and_rank(self) == type(self).tag_and_rank(self)
        return Echo.tag_and_rank(self)[1]

    @method
    def from_a_thread(self) -> tuple[int, int]:
        """Return the rank as seen by a thread that the role starts, and by the role itself."""
        ranks: list[int] = []
        thread = threading.Thread(target=lambda: ranks.append(self.ctx.rank))
        thread.start()
        thread.join()
        return ranks[0], self.ctx.rank

    @method(dispatch=OnRank(0))
    def call_a_view(self) -> Any:
        """Start a runtime and a group inside a worker, and call a view of that group."""
        with colocate.connect("local") as runtime, runtime.reserve() as pool:
            return pool.spawn({"inner": colocate.role(Echo)}).role("inner", Echo).echo(1)

    @method
    def tracked(self, gate: Address | None = None) -> Tracked:
        """Return an object that connects to the gate when it is freed."""
        value = Tracked([1])
        self.tracked_ref = weakref.ref(value)
        if gate is not None:
            weakref.finalize(value, is_open, gate).atexit = False
        return value

    @method
    def is_alive(self) -> bool:
        """Return whether the last result of `tracked` still exists."""
        return self.tracked_ref() is not None

    @method
    def progress_at(self, gate: Address, done: int, total: int) -> None:
        self.ctx.progress(done, total)
        pass_gate(gate)


class Log(Role):
    """A role that records which calls ran, in which order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.event: asyncio.Event | None = None

    @method
    def add(self, entry: Any) -> None:
        self.entries.append(entry)

    @method
    def read(self) -> list[Any]:
        return list(self.entries)

    @method
    def clear(self) -> None:
        self.entries.clear()
        self.event = None

    @method
    def add_at(self, gate: Address, entry: Any) -> None:
        pass_gate(gate)
        self.entries.append(entry)

    @method
    def add_and_look(self, gate: Address, entry: Any) -> bool:
        """Record an entry, and return whether a gate was already open when the call began."""
        was_open = is_open(gate)
        self.entries.append(entry)
        return was_open

    @method(dispatch=PerRank("gate", "then"))
    def at(self, gate: Address | None, then: str, entry: Any = None) -> Any:
        """Wait at the rank's gate, if any, and then raise or record an entry."""
        if gate is not None:
            pass_gate(gate)
        if then == "raise":
            raise ValueError(f"rank {self.ctx.rank} was told to raise")
        self.entries.append(entry)
        return entry

    @method
    async def async_add(self, entry: Any, gate: Address | None = None) -> None:
        self.entries.append(f"begin {entry}")
        if gate is not None:
            await pass_gate_async(gate)
        self.entries.append(f"end {entry}")

    @method(concurrency=2)
    async def meet(self, entry: Any) -> str:
        """Wait for a second concurrent call of this method, which wakes the first call."""
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
        self.entries.append("in")
        await pass_gate_async(gate)
        self.entries.append("out")

    @method(dispatch=PerRank("gate"), concurrency=3)
    async def async_at(self, gate: Address, failing: int | None = None) -> None:
        """Wait until the gate is open, then raise on rank `failing`. Record a cancellation."""
        try:
            await pass_gate_async(gate)
        except asyncio.CancelledError:
            self.entries.append("cancelled")
            raise
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} was told to raise")
        self.entries.append("waited")

    @method
    def look_until_cancelled(self, gate: Address) -> str:
        """Pass a gate, and then work until the call is cancelled."""
        pass_gate(gate)
        pause = threading.Event()
        while not self.ctx.cancelled:
            pause.wait(0.002)
        return "cancelled"
