"""Memory of this process that is to hold zeros, and takes none then."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence

import attrs

from colocate._system.libc import check, libc
from colocate._system.mappings import Area, areas_of, mappings_now, merged, refuse_too_many, split
from colocate._system.spill_files import MAP_FIXED


@attrs.frozen
class Emptying:
    """Memory of this process's own that is to hold zeros.

    Attributes:
        areas: Pages of it, which take no memory then.
        rest: The rest, which shares its pages with something else.
    """

    areas: Sequence[Area]
    rest: Sequence[Area]

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int]]) -> Emptying:
        """That of pieces, by addresses and sizes."""
        wholes = merged(pieces)
        areas = areas_of((start, stop - start) for start, stop in wholes)
        return cls(areas, split(wholes, areas)[1])

    def check(self, beside: int = 0) -> None:
        """Look whether it can be done.

        Args:
            beside: How many other pieces of memory are put away with it.

        Raises:
            OSError: The kernel's tables have no room for it.
        """
        refuse_too_many(len(mappings_now()) + 2 * (len(self.areas) + beside))

    def empty(self) -> None:
        """Have it hold zeros, whether it is in memory or in a file."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        for start, stop in self.areas:
            if libc().mmap(start, stop - start, protection, flags, -1, 0) != start:
                check(-1)
        for start, stop in self.rest:
            ctypes.memset(start, 0, stop - start)
