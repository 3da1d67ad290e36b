"""A role for the law of ownership: it keeps values, waits at gates, fails, and counts its worker's residents."""

from __future__ import annotations

import os
import time
from typing import Any

from colocate import Concat, First, Gather, Role, method


class Boom(Exception):
    """The error of a role that was told to fail."""


class Tenant(Role):
    """A role on every slot of its group."""

    def __init__(self, fails_on: int | None = None) -> None:
        if self.ctx.rank == fails_on:
            raise Boom("in the constructor")

    @method(collect=First())
    def echo(self, x: Any = None) -> Any:
        return x

    @method(collect=Concat())
    def make(self, number: int) -> list[int]:
        return [number, self.ctx.rank]

    @method(collect=Concat())
    def fail(self, number: int) -> list[int]:
        raise Boom(number)

    @method(collect=First())
    def wait(self, gate: str, x: Any = None) -> Any:
        """Wait until a file exists, or until the call is cancelled."""
        while not os.path.exists(gate) and not self.ctx.cancelled:
            time.sleep(0.002)
        return x

    @method(collect=Gather())
    def stored(self) -> int:
        """Return how many parts of residents this worker holds; nothing public counts parts by worker."""
        part: Any = self.ctx._part
        return len(part.__self__.store.entries)
