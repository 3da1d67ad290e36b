"""Pass memory between processes in sealed anonymous files, and map such files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from itertools import islice

from colocate._definitions.packed import Buffer

F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
ALL_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
_MAP_FIXED = 0x10
_VECTORS = os.sysconf("SC_IOV_MAX")

NONE_FREE = "no file descriptor is free for a message's memory: raise `ulimit -n`"
"""Error text for a process without a free descriptor, on sending or receiving."""

_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def create_memory_file(pieces: Iterable[Buffer]) -> int:
    """Write pieces of memory into a new anonymous file, and seal the file against any change.

    Args:
        pieces: Contiguous memory.

    Returns:
        The file's descriptor; the caller closes it.

    Raises:
        OSError: No descriptor is free, or no memory.
    """
    file = create_file()
    try:
        _write_all(file, pieces)
        _seal(file)
    except BaseException:
        os.close(file)
        raise
    return file


def create_file() -> int:
    """Return an empty anonymous file.

    Raises:
        OSError: No descriptor is free.
    """
    try:
        return os.memfd_create("colocate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise OSError(error.errno, NONE_FREE) if error.errno == errno.EMFILE else error from None


def seal_length(file: int) -> None:
    """Seal a file against shrinking, because a mapping must not lose pages."""
    fcntl.fcntl(file, F_ADD_SEALS, _SEAL_SHRINK)


def _write_all(file: int, pieces: Iterable[Buffer]) -> None:
    # Writing is faster than mapping and copying, which costs a page fault and a cleared page per page.
    views, at = iter([memoryview(piece) for piece in pieces if len(piece)]), 0
    while batch := list(islice(views, _VECTORS)):
        at = _write_batch(file, batch, at)


def _seal(file: int) -> None:
    """Seal a file against all changes.

    The kernel refuses while it refers to one of the pages itself, for example to move the page. It waits up to 0.15 s
    for the end (mm/memfd.c, `memfd_wait_for_pins`), and may then refer to the next page, so retries are needed. No
    other process has the file yet.
    """
    for last in (False, False, False, True):
        try:
            fcntl.fcntl(file, F_ADD_SEALS, ALL_SEALS)
            return
        except OSError as error:
            if last or error.errno != errno.EBUSY:
                raise


def _write_batch(file: int, batch: list[memoryview], at: int) -> int:
    first = 0
    while first < len(batch):
        written = os.pwritev(file, batch[first:], at)
        at += written
        while first < len(batch) and written >= len(batch[first]):
            written -= len(batch[first])
            first += 1
        if written:
            batch[first] = batch[first][written:]
    return at


def map_private(file: int, length: int) -> memoryview:
    """Map a sealed file as private writable memory, which is unmapped with the last reference.

    Args:
        file: A file from `create_memory_file`; may be closed afterwards.
        length: Number of bytes to map.

    Returns:
        The memory.

    Raises:
        ValueError: The file isn't sealed against shrinking or is too short (access to the memory could kill the
            process).
    """
    return memoryview(map_file(file, length, mmap.MAP_PRIVATE))


def map_file(file: int, length: int, how: int) -> mmap.mmap:
    """Map a file that can't become shorter; `how` is `mmap.MAP_PRIVATE` or `mmap.MAP_SHARED`."""
    if os.fstat(file).st_size < length or not fcntl.fcntl(file, _F_GET_SEALS) & _SEAL_SHRINK:
        raise ValueError("a message's memory isn't sealed or is too short")
    # `mmap.mmap(file)` would keep a descriptor open, so the file is mapped over an anonymous mapping.
    memory = mmap.mmap(-1, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc_mmap(address, length, protection, how | _MAP_FIXED, file, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"can't map a message's memory: {os.strerror(number)}")
    return memory
