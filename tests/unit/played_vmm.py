"""`vmm.c` on a played driver (`played_cuda.c`): its GPU's memory is the host's, and has a limit."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from colocate.features.memory import ledger, vmm
from colocate.features.memory.vmm import Vmm, compile_library

GRAIN = 1 << 16  # in place of the real driver's 2 MiB
ROOM = 256 * GRAIN


@functools.cache
def _built() -> dict[str, bytes]:
    """Return both compiled libraries by name."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        path, source = Path(folder, "played_cuda.so"), Path(__file__).with_name("played_cuda.c")
        subprocess.check_call(["cc", "-O2", "-fPIC", "-shared", "-o", str(path), str(source)])
        return {each.name: each.read_bytes() for each in (compile_library(Path(folder)), path)}


class PlayedVmm:
    """A played GPU with the real `vmm.c`.

    Attributes:
        vmm: The allocator.
        driver: The played driver, with its controls.
        path: The driver's file.
    """

    def __init__(self, folder: Path) -> None:
        """Load copies from `folder`, apart from those of other tests."""
        for name, content in _built().items():
            (folder / name).write_bytes(content)
        path = folder / "played_cuda.so"
        self.path = str(path)
        self.driver: Any = ctypes.CDLL(str(path))
        for name in ("in_use", "mappings", "ranges"):
            getattr(self.driver, f"played_{name}").restype = ctypes.c_size_t
        self.driver.played_begin(ctypes.c_size_t(ROOM), ctypes.c_size_t(GRAIN))
        self.vmm = Vmm(folder / "vmm.so", str(path))
        self._alloc, self._free = self.vmm._library.colocate_vmm_alloc, self.vmm._library.colocate_vmm_free
        self._alloc.restype = ctypes.c_void_p

    def alloc(self, size: int) -> int | None:
        """Return a segment's address, as torch requests it."""
        address: int | None = self._alloc(ctypes.c_ssize_t(size), ctypes.c_int(0), None)
        return address

    def free(self, address: int) -> None:
        """Free a segment, as torch does."""
        self._free(ctypes.c_void_p(address), ctypes.c_ssize_t(0), ctypes.c_int(0), None)

    def end(self) -> None:
        """Free all of the driver's memory."""
        self.driver.played_end()

    def limit(self, size: int) -> None:
        """Limit the memory from now on."""
        self.driver.played_limit(ctypes.c_size_t(size))

    def fail_at(self, call: int) -> None:
        """Make one of the next calls of the driver fail; 0 for none."""
        self.driver.played_fail_at(ctypes.c_long(call))

    def state(self) -> tuple[int, int, int]:
        """Return the driver's bytes in use, mappings and ranges of addresses, and check that no call was impossible."""
        assert self.driver.played_misuses() == 0
        return self.driver.played_in_use(), self.driver.played_mappings(), self.driver.played_ranges()


class Arena:
    """A stand-in for torch's allocator: tensors that are side by side in segments, and its statistics.

    Attributes:
        segments: The blocks of each segment, with size and state, by address.
        cached: The addresses that `empty_cache` frees.
    """

    def __init__(self, gpu: PlayedVmm, patch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.segments: dict[int, list[dict[str, Any]]] = {}
        self.cached: list[int] = []
        patch.setattr(Vmm, "_instance", (gpu.vmm, None))
        for module in (vmm, ledger):
            patch.setattr(module, "in_use", lambda device: self)

    def segment(self, *blocks: int, states: Mapping[int, str] = MappingProxyType({})) -> list[Any]:
        """Return tensors of so many bytes in a new segment; None for each block with a state of its own."""
        import torch

        begin = self.gpu.alloc(sum(blocks))
        assert begin is not None
        found = self.segments[begin] = []
        tensors: list[Any] = []
        for index, size in enumerate(blocks):
            state = states.get(index)
            found.append({"size": size, "state": state or "active_allocated"})
            memory = (ctypes.c_uint8 * size).from_address(begin)
            tensors.append(None if state else torch.frombuffer(memory, dtype=torch.uint8))
            begin += size
        return tensors

    # The interface of torch.cuda

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return all segments, and one whose memory can't be moved from its addresses."""
        own = [{"address": address, "blocks": blocks} for address, blocks in self.segments.items()]
        return [{"address": 1 << 40, "blocks": [{"size": 1 << 20, "state": "active_allocated"}]}, *own]

    def empty_cache(self) -> None:
        """Free the cached segments."""
        while self.cached:
            self.gpu.free(self.cached.pop())

    def memory_allocated(self, device: str) -> int:
        """Return the bytes of tensors, by torch's books."""
        blocks = [block for blocks in self.segments.values() for block in blocks]
        return sum(block["size"] for block in blocks if block["state"] == "active_allocated")

    def memory_reserved(self, device: str) -> int:
        """Return the bytes of segments, by torch's books."""
        return sum(segment.size for segment in self.gpu.vmm.list_segments(0))

    def mem_get_info(self, device: str) -> tuple[int, int]:
        """Return the free and the total bytes."""
        return ROOM - self.gpu.state()[0], ROOM


def fill(address: int, size: int, value: int) -> None:
    """Set each byte to a value."""
    ctypes.memset(address, value, size)


def holds(address: int, size: int, value: int) -> bool:
    """Return whether each byte has a value."""
    return ctypes.string_at(address, size) == bytes([value]) * size
