"""Roles that draw from the default generators of their process, and set torch's switches. Needs torch and NumPy."""

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
    """Numbers of each default generator, that of the device last.

    Some generators draw two at once, and leave one of them for the next time.
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
    """Seed all of them, as libraries' `set_seed` do."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def draw_there(ctx: Context) -> list[float]:
    """The same, as a function on a worker."""
    return draw(ctx.device)


class Numbers(Role):
    """Draws, in its constructor for the first time."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            seed_all(seed)
        self.drawn = [draw(self.ctx.device)]

    @method
    def draws(self) -> list[list[float]]:
        """Draw, and return all that was drawn so far."""
        self.drawn.append(draw(self.ctx.device))
        return self.drawn

    @method
    def seed(self, seed: int) -> None:
        seed_all(seed)

    @method(concurrency=2)
    async def soon(self, times: int) -> list[list[float]]:
        """Draw that often, and wait each time until others have had their turn."""
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
        draw(self.ctx.device)  # as a library may that reads files
