"""Call functions of the C library: `malloc` settings, advice on pages, and death with the parent process."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys

LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1

_LARGEST_LEFT_FOR_LATER = 1  # `M_MXFAST` of malloc.h


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def trim() -> None:
    """Return unused memory of `malloc` to the system, if the C library can."""
    function = getattr(libc(), "malloc_trim", None)
    if function is not None:
        function(ctypes.c_size_t(0))


def merge_at_once() -> None:
    """Make `malloc` merge small freed pieces with free neighbours at once, in this process.

    By default glibc postpones the merging until an allocation finds no room, then merges all pieces. In an arena with
    few free bytes this happens again and again after some thousand operations of torch, for a twentieth of their time.
    Merging at once costs no measurable time.
    """
    function = getattr(libc(), "mallopt", None)
    if function is not None:
        function(_LARGEST_LEFT_FOR_LATER, 0)


def advise_large(start: int, end: int, advice: int) -> None:
    """Give the kernel advice (`madvise(2)`) on the whole large pages in an area, if there are any."""
    start, end = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, end - end % LARGE_PAGE_BYTES
    if start < end:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the parent's launching thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(0)
