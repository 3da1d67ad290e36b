"""The C library's functions for memory."""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def libc() -> ctypes.CDLL:
    """The library that this process has already, with the types of what is called."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    library.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    library.mmap.restype = library.mremap.restype = address
    library.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, ctypes.c_int]
    library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], address
    library.open_memstream.argtypes, library.open_memstream.restype = [address, address], address
    library.fclose.argtypes = library.free.argtypes = [address]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, offset, offset]
    return library


def check(result: int) -> None:
    """Raise what a function has left in `errno` when its result isn't 0.

    Raises:
        OSError: It isn't.
    """
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def foreign_allocator() -> str | None:
    """The file of the library that `malloc` is from, when that isn't the C library."""

    class Info(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    library, info = libc(), Info()
    if (version := getattr(library, "gnu_get_libc_version", None)) is None:
        return "another C library than glibc"
    files = []
    for function in (library.malloc, version):
        library.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
        files.append(os.fsdecode(info.file or b"an unknown library"))
    return None if files[0] == files[1] else files[0]
