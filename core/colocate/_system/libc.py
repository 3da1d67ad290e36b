"""What this process asks of the C library: of its `malloc`, and to end with the process that started it."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys

LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1

_LARGEST_LEFT_FOR_LATER = 1  # `M_MXFAST`, of malloc.h


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the library that this process has already."""
    return ctypes.CDLL(None)


def trim() -> None:
    """Have `malloc` give back what it holds and nobody uses; some libraries have no way to ask for it."""
    function = getattr(libc(), "malloc_trim", None)
    if function is not None:
        function(ctypes.c_size_t(0))


def merge_at_once() -> None:
    """Have `malloc` merge a small piece that is freed with what is free beside it at once, in all of this process.

    By default glibc leaves such pieces for later, and merges all that there are when it finds no room for the next one:
    where an arena has hardly any, after some thousand operations of torch, again and again, for a twentieth of their
    time. To merge each at once takes no time that could be measured.
    """
    function = getattr(libc(), "mallopt", None)
    if function is not None:
        function(_LARGEST_LEFT_FOR_LATER, 0)


def advise_large(start: int, end: int, advice: int) -> None:
    """Give the kernel advice (`madvise(2)`) on the large pages that lie in an area as a whole, if there are any."""
    start, end = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, end - end % LARGE_PAGE_BYTES
    if start < end:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's launching thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel had been told
        os._exit(0)
