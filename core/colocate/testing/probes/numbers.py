"""A role that draws from the default random generators of its process. Needs torch and NumPy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import Context, Role, method
from colocate.testing.probes import optional

if TYPE_CHECKING:
    import numpy
    import torch
else:
    numpy, torch = optional("numpy"), optional("torch")


def draw(device: Any) -> list[float]:
    """Return random numbers from each default generator, with the device's generator last.

    Some generators draw two numbers at once, and keep the second number for the next call.
    """
    numbers: Any = numpy.random
    return [
        random.random(),
        random.gauss(0, 1),
        float(numbers.rand()),
        float(numbers.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
        float(torch.rand((), device=device)),
    ]


def seed_all(seed: int) -> None:
    """Seed all default generators, as the `set_seed` functions of libraries do."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def draw_there(ctx: Context) -> list[float]:
    """Return the numbers of `draw`, as a function that is run on a worker."""
    return draw(ctx.device)


class Numbers(Role):
    """A role that draws random numbers in its constructor and in its methods."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            seed_all(seed)
        self.drawn = [draw(self.ctx.device)]

    @method
    def draws(self) -> list[list[float]]:
        """Draw once more, and return all numbers that were drawn so far."""
        self.drawn.append(draw(self.ctx.device))
        return self.drawn

    @method
    def seed(self, seed: int) -> None:
        seed_all(seed)

    @method(concurrency=2)
    async def soon(self, times: int) -> list[list[float]]:
        """Draw `times` times, and let other tasks run after each draw."""
        for _ in range(times):
            self.drawn.append(draw(self.ctx.device))
            await asyncio.sleep(0)
        return self.drawn

    @method(concurrency=2)
    async def seed_again_and_again(self, times: int) -> None:
        for _ in range(times):
            seed_all(42)
            await asyncio.sleep(0)

    def save(self, directory: str) -> None:
        (Path(directory) / "there").touch()

    def restore(self, directory: str) -> None:
        draw(self.ctx.device)  # A library that reads files may draw numbers, too.
