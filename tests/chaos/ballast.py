"""Memory of a role that goes away and comes back, and what the calls of the role have made of it."""

from __future__ import annotations

import ctypes
import functools
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"c": 1 << 20, "d": 1 << 19}
_SIZE = 1 << 18
_APART = (1 << 16) + 1
CHANGED = "memory that isn't what it was"


def size_of(role: str) -> int:
    return SIZES.get(role, _SIZE)


class Ballast:
    """Memory that sleeps and wakes, with something that wants it to be what it was.

    It is an array, which stays awake, or a tensor, which doesn't.
    """

    def __init__(self, role: str, rank: int, tensor: bool = False) -> None:
        if tensor:
            import torch

            self.memory: Any = torch.empty(size_of(role), dtype=torch.uint8)
        else:
            self.memory = np.empty(size_of(role), dtype=np.uint8)
        self.array[:] = np.frombuffer(_first(role, rank), dtype=np.uint8)
        self.sum = self.digest()

    @property
    def array(self) -> np.ndarray:
        """The memory where it is now: a tensor of which there was an array would never sleep."""
        if isinstance(self.memory, np.ndarray):
            return self.memory
        place = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.data_ptr())
        return np.frombuffer(place, dtype=np.uint8)

    def use(self, ident: int) -> None:
        self.look(ident)
        self.write(ident)
        self.sum = self.digest()

    def look(self, ident: int) -> int:
        found = self.digest()
        if found != self.sum:
            raise AssertionError(f"call {ident} finds {CHANGED}")
        return found

    def write(self, ident: int) -> None:
        view = self.array[1000:]
        view[ident * 4099 % len(view) :: _APART] = ident % 251

    def digest(self) -> int:
        return zlib.crc32(self.array.data)

    def save(self, path: Path) -> None:
        path.write_bytes(self.array.data)

    def restore(self, path: Path) -> None:
        self.array[:] = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        self.sum = self.digest()


def digest_after(role: str, rank: int, idents: Iterable[int]) -> int:
    """What it is to be after such calls, in this order."""
    ballast = Ballast(role, rank)
    for ident in idents:
        ballast.write(ident)
    return ballast.digest()


@functools.lru_cache
def _first(role: str, rank: int) -> bytes:
    """What it is before them: no two pages are alike, or those of two ranks."""
    return random.Random(f"{role} {rank}").randbytes(size_of(role))
