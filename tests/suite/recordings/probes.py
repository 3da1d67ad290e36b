"""Roles that are recorded, replayed and compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from colocate import Concat, First, OnRank, Reduce, Role, Scatter, method
from colocate.testing.gate import Address, pass_gate_async


@attrs.frozen
class Answer:
    """A record with a text and numbers."""

    text: str
    numbers: torch.Tensor


class OutOfLuckError(Exception):
    """A custom error class with an attribute."""

    def __init__(self, why: str) -> None:
        super().__init__(f"out of luck: {why}")
        self.why = why


class Player(Role):
    """A role that returns values of many kinds; with `marks`, each constructor creates a file there."""

    def __init__(self, marks: str | None = None, bias: float = 0.0) -> None:
        if marks is not None:
            (Path(marks) / f"rank-{self.ctx.rank}").touch()
        self._bias = bias
        self._buffer = torch.zeros(2)
        self._weights = torch.ones(3)

    @method(dispatch=Scatter("prompts"), collect=Concat())
    def generate(self, prompts: torch.Tensor, temperature: float = 1.0) -> dict[str, Any]:
        """Draw random numbers."""
        noise = torch.rand(prompts.shape, generator=self.ctx.generator)
        return {"ids": prompts * temperature + noise + self._bias, "text": [f"row {float(row)}" for row in prompts]}

    @method
    def buffer(self) -> torch.Tensor:
        """Return a tensor that the next call changes in place."""
        self._buffer += 1
        return self._buffer

    @method
    def answer(self, text: str) -> Answer:
        """Return a record."""
        return Answer(text, torch.full((2,), self._bias + self.ctx.rank))

    @method
    def lucky(self, rank: int) -> str:
        """Fail on one rank."""
        if self.ctx.rank == rank:
            raise OutOfLuckError(f"rank {rank}")
        return "lucky"

    @method
    def odd(self) -> None:
        """Fail with an error whose class can't be found by its name."""

        class OddError(Exception):
            pass

        raise OddError("it is odd")

    @method(concurrency=4)
    async def later(self, number: int) -> int:
        """Return a number after yielding to the event loop."""
        await asyncio.sleep(0)
        return number + int(self._bias)

    @method
    def default(self) -> float:
        """Draw from torch's default generator."""
        return float(torch.rand(()))

    @method
    def foreign(self) -> object:
        """Return a value that can't be recorded."""
        return object()

    @method(collect=First())
    def give(self, what: str, bias: float = 0.0) -> Any:
        """Return a value of the named kind; `bias` changes its numbers."""
        points = np.array([(0.5, False, (1.0, bias))], [("reward", "f4"), ("done", "?"), ("obs", "f4", (2,))])
        return {
            "points": points,
            "point": points[0],
            "missing": np.array([0.25, np.nan, 1.0]) + bias,
            "times": np.array(["NaT", "2026-01-01"], "M8[D]") + int(bias),
            "type": np.ones(2, "f8" if bias else "f4"),
            "error": OutOfLuckError(f"by {bias}"),
            "both": {"x": [points, (points, OutOfLuckError(str(bias)))]},
        }[what]

    @method
    def large(self, count: int) -> torch.Tensor:
        """Return `count` numbers."""
        return torch.zeros(count)

    @method(rows="row", concurrency=8)
    async def play(self, row: Any, gates: list[Address] | None = None) -> Any:
        """Return a row once its gate is open; the row 'fails' raises."""
        if gates is not None:
            await pass_gate_async(gates[self.ctx.row or 0])
        if row == "fails":
            raise OutOfLuckError("this row")
        return row

    @method(dispatch=Scatter("rows"))
    def produce(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the rows in reverse order."""
        for index in reversed(range(len(rows))):
            yield index, rows[index] + int(self._bias)

    @method(dispatch=Scatter("rows"))
    async def produce_async(self, rows: list[int]) -> AsyncIterator[tuple[int, int]]:
        """Yield the rows in reverse order."""
        for index in reversed(range(len(rows))):
            await asyncio.sleep(0)
            yield index, rows[index]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights."""
        yield "weights", self._weights

    def load_weights(self, weights: Any, version: int) -> None:
        """Copy the given weights."""
        for _, tensor in weights:
            self._weights.copy_(tensor)

    def save(self, directory: str) -> None:
        """Write a file for this rank."""
        (Path(directory) / f"rank-{self.ctx.rank}").write_text("state", encoding="utf-8")

    def restore(self, directory: str) -> None:
        """Assert that this rank's file is there."""
        assert (Path(directory) / f"rank-{self.ctx.rank}").read_text(encoding="utf-8") == "state"


class BufferedPlayer(Player):
    """A player whose checkpoints contain the buffer."""

    def save(self, directory: str) -> None:
        """Save the buffer."""
        torch.save(self._buffer, Path(directory) / f"rank-{self.ctx.rank}")

    def restore(self, directory: str) -> None:
        """Load the buffer."""
        self._buffer = torch.load(Path(directory) / f"rank-{self.ctx.rank}")


class Critic(Role):
    """A role that draws its own random numbers and uses another role's values."""

    @method
    def default(self) -> float:
        """Draw from torch's default generator."""
        return float(torch.rand(()))

    @method
    def look(self) -> str:
        """Read an attribute of a sibling."""
        return str(self.ctx.sibling("player")._bias)

    @method(dispatch=Scatter("batch"), collect=Concat())
    def value(self, batch: dict[str, Any]) -> torch.Tensor:
        """Add random numbers from the role's generator and from one with the call's seed."""
        generator = torch.Generator().manual_seed(self.ctx.call_seed)
        values: torch.Tensor = batch["ids"] + torch.rand(batch["ids"].shape, generator=self.ctx.generator)
        return values + torch.rand(1, generator=generator)


class Giver(Role):
    """A source whose weights change with each `learn`."""

    def __init__(self, bias: float = 0.0) -> None:
        self._weights = torch.ones(3)
        self._bias = bias

    @method(collect=First())
    def learn(self) -> float:
        """Change the weights; the result is always 1.0."""
        self._weights = self._weights + 1 + self._bias
        return 1.0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights."""
        yield "weights", self._weights


class Taker(Role):
    """A role that computes with weights synced from another role."""

    def __init__(self, bias: float = 0.0) -> None:
        self._weights = torch.zeros(3)
        self._bias = bias

    def load_weights(self, weights: Any, version: int) -> None:
        """Copy the given weights; a replayed source gives none."""
        for _, tensor in weights:
            self._weights.copy_(tensor)

    @method(dispatch=Scatter("batch"), collect=Concat())
    def answer(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows, scaled by the weights."""
        return batch * self._weights.sum() + self._bias

    @method(rows="row", concurrency=2)
    async def play(self, row: float) -> float:
        """Return a row, scaled by the weights."""
        return row * float(self._weights.sum())


class Steady(Role):
    """A role whose joined results don't depend on the number of ranks, except `who`; a bias changes only row 5."""

    def __init__(self, bias: float = 0.0) -> None:
        self._bias = bias

    @method(dispatch=Scatter("batch"), collect=Concat())
    def double(self, batch: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        """Return the rows, scaled."""
        return {"twice": scale * batch + self._bias * (batch == 5), "text": [str(float(row)) for row in batch]}

    @method(dispatch=Scatter("batch", pad=True), collect=Concat())
    def padded(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows, including padding."""
        return 2 * batch

    @method(dispatch=Scatter("batch", balance="costs"), collect=Concat())
    def balanced(self, batch: torch.Tensor, costs: list[int]) -> torch.Tensor:
        """Return the rows, which the driver has assigned to the ranks by cost."""
        return 2 * batch

    @method(dispatch=Scatter("batch"), collect=Reduce("mean"))
    def mean(self, batch: torch.Tensor) -> dict[str, float]:
        """Return a mean over the rows."""
        return {"mean": float(batch.mean())}

    @method(collect=First())
    def shape(self) -> list[int]:
        """Return a value that is the same on all ranks."""
        return [2, 3]

    @method(dispatch=OnRank(0))
    def whole(self, batch: torch.Tensor) -> float:
        """Return the sum of all rows."""
        return float(batch.sum())

    @method(dispatch=Scatter("batch"))
    def learn(self, batch: torch.Tensor) -> None:
        """Return nothing."""

    @method
    def who(self) -> int:
        """Return the rank."""
        return self.ctx.rank

    @method(dispatch=Scatter("batch"))
    def fail(self, batch: torch.Tensor) -> None:
        """Fail on the rank that has row 5."""
        if 5 in batch:
            raise OutOfLuckError("row 5")

    @method(rows="row", concurrency=8)
    async def play(self, row: float, scale: float = 1.0) -> float:
        """Return a row; a bias changes row 5."""
        return row + self._bias * (row == 5)

    @method(dispatch=Scatter("rows"))
    def produce(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the rows in reverse order."""
        for index in reversed(range(len(rows))):
            yield index, rows[index] + int(self._bias) * (rows[index] == 5)
