"""`vmm.c` on a driver that is played (`played_cuda.c`): its GPU's memory is the host's, and has an end."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from colocate.worker.vmm import Vmm, compiled

GRAIN = 1 << 16  # as the real driver's 2 MiB
ROOM = 256 * GRAIN


@functools.cache
def _built() -> dict[str, bytes]:
    """Both, compiled."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        path, source = Path(folder, "played_cuda.so"), Path(__file__).with_name("played_cuda.c")
        subprocess.check_call(["cc", "-O2", "-fPIC", "-shared", "-o", str(path), str(source)])
        return {each.name: each.read_bytes() for each in (compiled(Path(folder)), path)}


class PlayedVmm:
    """One GPU's, with `vmm.c` as it is.

    Attributes:
        vmm: That.
        driver: The driver, with what a test asks of it.
    """

    def __init__(self, folder: Path) -> None:
        """Args: folder: Where it is loaded from: a copy, so that others have nothing to do with it."""
        for name, content in _built().items():
            (folder / name).write_bytes(content)
        path = folder / "played_cuda.so"
        self.driver: Any = ctypes.CDLL(str(path))
        for name in ("in_use", "mappings", "ranges"):
            getattr(self.driver, f"played_{name}").restype = ctypes.c_size_t
        self.driver.played_calls.restype = ctypes.c_long
        self.driver.played_begin(ctypes.c_size_t(ROOM), ctypes.c_size_t(GRAIN))
        self.vmm = Vmm(folder / "vmm.so", str(path))
        self._alloc, self._free = self.vmm._library.colocate_vmm_alloc, self.vmm._library.colocate_vmm_free
        self._alloc.restype = ctypes.c_void_p

    def alloc(self, size: int) -> int | None:
        """A segment's address, as torch asks for it."""
        address: int | None = self._alloc(ctypes.c_ssize_t(size), ctypes.c_int(0), None)
        return address

    def free(self, address: int) -> None:
        """As torch lets go of it."""
        self._free(ctypes.c_void_p(address), ctypes.c_ssize_t(0), ctypes.c_int(0), None)

    def end(self) -> None:
        """Nothing is left of its memory."""
        self.driver.played_end()

    def limit(self, size: int) -> None:
        """How much memory there is from now on."""
        self.driver.played_limit(ctypes.c_size_t(size))

    def fail_at(self, call: int) -> None:
        """Which of the next calls of the driver fails; 0 for none."""
        self.driver.played_fail_at(ctypes.c_long(call))

    def calls(self) -> int:
        """How many there have been since."""
        return int(self.driver.played_calls())

    def state(self) -> tuple[int, int, int]:
        """Bytes that the driver has given, mappings, and ranges of addresses; it was asked for nothing impossible."""
        assert self.driver.played_misuses() == 0
        return self.driver.played_in_use(), self.driver.played_mappings(), self.driver.played_ranges()


def fill(address: int, size: int, value: int) -> None:
    """Write a byte everywhere."""
    ctypes.memset(address, value, size)


def holds(address: int, size: int, value: int) -> bool:
    """Whether it is everywhere."""
    return ctypes.string_at(address, size) == bytes([value]) * size
