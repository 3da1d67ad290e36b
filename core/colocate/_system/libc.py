"""Call functions of the C library to tune `malloc`, advise the kernel on pages, and end with the parent process."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys

LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux has this advice since version 6.1.

_LARGEST_LEFT_FOR_LATER = 1  # This is `M_MXFAST` of malloc.h.


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def trim() -> None:
    """Return unused memory of `malloc` to the system, if the C library supports that."""
    function = getattr(libc(), "malloc_trim", None)
    if function is not None:
        function(ctypes.c_size_t(0))


def merge_at_once() -> None:
    """Configure this process's `malloc` to merge small freed pieces with free neighbours at once.

    By default glibc postpones the merging until an allocation finds no room, then merges all pieces. In an arena with
    few free bytes this happens again and again after some thousand operations of torch, for a twentieth of their time.
    Merging at once costs no measurable time.
    """
    function = getattr(libc(), "mallopt", None)
    if function is not None:
        function(_LARGEST_LEFT_FOR_LATER, 0)


def advise_large(start: int, end: int, advice: int) -> None:
    """Pass advice to the kernel (`madvise(2)`) for all complete large pages in a memory range."""
    start, end = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, end - end % LARGE_PAGE_BYTES
    if start < end:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the launching thread of the parent process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # The parent had ended before the call of `prctl`.
        os._exit(0)
