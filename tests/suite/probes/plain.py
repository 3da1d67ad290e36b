"""Roles on plain Python values."""

from __future__ import annotations

import logging
import sys
from functools import cached_property
from typing import Any, NoReturn

import colocate
from colocate import Context, Gather, Role, method
from colocate.testing.gate import Address, pass_gate


class Talker(Role):
    """A role that prints."""

    @method
    def talk(self, lines: int, characters: int) -> int:
        """Print lines of equal length, and return their number."""
        for _ in range(lines):
            print("x" * characters)
        return lines

    @method
    def count_to_two(self, address: Address) -> None:
        """Print a progress bar that stays at one while a gate is closed."""
        print("\r1 of 2", end="", file=sys.stderr)
        pass_gate(address)
        print("\r2 of 2\nafter it", file=sys.stderr)

    @method
    def log(self, names: list[str]) -> None:
        for name in names:
            logging.getLogger(name).debug("said")
            logging.getLogger(name).info("said")


class Plain:
    """A role that knows nothing of colocate's base class."""

    def __init__(self, start: int) -> None:
        self.start = start + colocate.context().rank

    @method(collect=Gather())
    def value(self) -> int:
        return self.start


def _raise_never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it is no method for colocate")


class Machine:
    """A callable that isn't a method."""

    __call__ = _raise_never


class Ported(Role):
    """An older class whose attributes have the names of colocate's hooks, and aren't methods."""

    def __init__(self) -> None:
        self.device_state = "idle"
        self.sleep, self.close = Machine(), Machine

    @property
    def managed(self) -> Any:
        return _raise_never()

    @cached_property
    def wake(self) -> Any:
        return _raise_never()

    def __getattr__(self, name: str) -> Any:
        if name in ("apart", "renew", "plan"):
            return _raise_never
        raise AttributeError(name)

    @method
    def state(self) -> str:
        return self.device_state


def return_number(ctx: Context) -> int:
    """Return 1 from a worker."""
    return 1
