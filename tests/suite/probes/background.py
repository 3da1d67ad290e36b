"""A role that runs in the background or not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import Role, Scatter, method
from colocate.testing.gate import Address, is_open, pass_gate, pass_gate_async
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch

    from colocate import Weights
else:
    torch = import_optional("torch")


_STEP_S = 0.002


class Boom(Exception):
    """The error that roles raise on request."""


class Beside(Role):
    """A role for either lane, whose methods wait at gates."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory
        self.journal: list[str] = []

    @method
    def do(self, name: str, gate: Address | None = None, fails: int | None = None) -> tuple[str, int]:
        """Wait at a gate, if there is one; raise on one rank."""
        self.journal.append(name)
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == fails:
            raise Boom(name)
        return threading.current_thread().name, self.ctx.weights_version

    @method
    def read(self) -> list[str]:
        return self.journal

    @method
    def give(self, value: Any, gate: Address | None = None) -> Any:
        if gate is not None:
            pass_gate(gate)
        return value

    @method
    def scribble(self, values: list[torch.Tensor], gate: Address) -> None:
        """Write into an argument, which no method may, and wait at a gate."""
        values[0].add_(1)
        pass_gate(gate)

    @method
    def generate(self, gate: Address) -> list[tuple[int, bool]]:
        """Do steps until the weights change; return each step's version, and whether it was new.

        Report the start at a gate without waiting there.
        """
        is_open(gate)
        versions: list[tuple[int, bool]] = []
        while not self.ctx.cancelled and not any(changed for _, changed in versions):
            time.sleep(_STEP_S)
            changed = self.ctx.pause_point()
            versions.append((self.ctx.weights_version, changed))
        return versions

    @method(concurrency=2)
    async def generate_async(self, gate: Address) -> list[tuple[int, bool]]:
        is_open(gate)
        versions: list[tuple[int, bool]] = []
        while not self.ctx.cancelled and not any(changed for _, changed in versions):
            await asyncio.sleep(_STEP_S)
            changed = await self.ctx.async_pause_point()
            versions.append((self.ctx.weights_version, changed))
        return versions

    @method(rows="row", concurrency=2)
    async def play(self, row: int) -> tuple[int, int]:
        await self.ctx.async_pause_point()
        return row, self.ctx.weights_version

    @method(dispatch=Scatter("rows"))
    def produce(self, rows: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
        for index, row in enumerate(rows):
            yield index, (row, self.ctx.weights_version)

    @method(dispatch=Scatter("rows"))
    async def produce_async(self, rows: list[int]) -> AsyncIterator[tuple[int, tuple[int, int]]]:
        for index, row in enumerate(rows):
            yield index, (row, self.ctx.weights_version)

    @method(rows="row", concurrency=2)
    async def use_tool(self, row: int, gate: Address) -> tuple[int, int]:
        async with self.ctx.resting():
            await pass_gate_async(gate)
        return row, self.ctx.weights_version

    @method(concurrency=2)
    async def wait(self, gate: Address) -> None:
        await pass_gate_async(gate)

    @method
    def ask(self, what: str) -> object:
        """Ask for a thing that a background role lacks."""
        if what == "alarm":
            import signal

            return signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if what == "timer":
            import signal

            return signal.setitimer(signal.ITIMER_REAL, 0)
        if what == "group":
            return self.ctx.process_group()
        return self.ctx.sibling(what)

    @method
    def hold(self, nbytes: int) -> None:
        self.held = torch.zeros(nbytes, dtype=torch.uint8, device=self.ctx.device)

    @method
    def end(self) -> None:
        import os

        os._exit(3)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(4)

    def load_weights(self, weights: Weights, version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def save(self, directory: str) -> None:
        (Path(directory) / f"journal-{self.ctx.rank}").write_text(" ".join(self.journal))

    def restore(self, directory: str) -> None:
        self.journal = (Path(directory) / f"journal-{self.ctx.rank}").read_text().split()

    def close(self) -> None:
        if self.directory is not None:
            name = f"{self.ctx.role}-{self.ctx.rank}"
            (Path(self.directory) / name).write_text(threading.current_thread().name)
