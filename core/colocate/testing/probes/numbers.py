"""A role that draws from the default random generators of its process. Needs torch and NumPy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import Context, Role, method
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import numpy
    import torch
else:
    numpy, torch = import_optional("numpy"), import_optional("torch")


def draw_numbers(device: Any) -> list[float]:
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


def draw_on_worker(ctx: Context) -> list[float]:
    """Return the numbers of `draw_numbers` on a worker; a function for `group.run`."""
    return draw_numbers(ctx.device)


class Numbers(Role):
    """A role that draws random numbers in its constructor and in its methods."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            seed_all(seed)
        self.drawn = [draw_numbers(self.ctx.device)]

    @method
    def draws(self) -> list[list[float]]:
        """Draw once more, and return all numbers that were drawn so far."""
        self.drawn.append(draw_numbers(self.ctx.device))
        return self.drawn

    @method
    def seed(self, seed: int) -> None:
        seed_all(seed)

    @method(concurrency=2)
    async def soon(self, times: int) -> list[list[float]]:
        """Draw `times` times, and let other tasks run after each draw."""
        for _ in range(times):
            self.drawn.append(draw_numbers(self.ctx.device))
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
        draw_numbers(self.ctx.device)  # A library that restores a state may draw numbers, too.
