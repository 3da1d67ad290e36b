"""Frees memory of NVIDIA GPUs and restores the memory at the same addresses. `vmm.c` is compiled at first use.

In a block of `keep_addresses` torch's caching allocator gets its memory from `vmm.c`. This code is in C because torch
calls it under a lock: Python code would wait for the GIL, and the thread with the GIL may wait for the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import attrs

from colocate._system.imported import find_imported
from colocate.errors import CapabilityError
from colocate.gpus import in_use, number_of

SOURCE = Path(__file__).with_name("vmm.c")
_ALLOC, _FREE = "colocate_vmm_alloc", "colocate_vmm_free"


class VmmError(RuntimeError):
    """Raised if the CUDA driver refuses a call."""


@attrs.frozen
class Segment:
    """A range of device addresses that torch has allocated, divided into chunks.

    Attributes:
        address: The start.
        size: The length in bytes.
        chunk: The length of a chunk in bytes; the last one may be shorter.
        serial: A unique number, because a later segment may have the same address.
    """

    address: int
    size: int
    chunk: int
    serial: int


@attrs.frozen
class Chunk:
    """A part of a segment, and the smallest unit of memory that can be freed.

    Attributes:
        address: The start.
        serial: The serial of its segment.
        used: The bytes of tensors in the chunk.
    """

    address: int
    serial: int
    used: int


class Vmm:
    """The compiled library `vmm.c` and the CUDA driver in this process. Devices have torch's numbers."""

    _instance: ClassVar[tuple[Vmm, Any] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, driver: str = "libcuda.so.1") -> None:
        """Load the compiled library at `path`, and the CUDA driver's library (`driver`)."""
        self._library = ctypes.CDLL(str(path))
        self._library.colocate_vmm_segments.restype = ctypes.c_size_t
        self._library.colocate_vmm_present.restype = ctypes.c_uint64
        for name in ("load", "error"):
            getattr(self._library, f"colocate_vmm_{name}").restype = ctypes.c_char_p
        missing = self._library.colocate_vmm_load(driver.encode())
        if missing is not None:
            raise VmmError(f"{driver}: {missing.decode(errors='replace')}")

    def is_supported(self, device: int) -> bool:
        """Return whether a device can free memory and restore the memory at the same addresses."""
        flag = ctypes.c_int()
        self._call("supported", device, ctypes.byref(flag))
        return bool(flag.value)

    def list_segments(self, device: int) -> list[Segment]:
        """Return all segments of a device."""
        most = 64
        while True:
            out = (ctypes.c_uint64 * (4 * most))()
            count = self._library.colocate_vmm_segments(ctypes.c_int(device), out, ctypes.c_size_t(most))
            if count <= most:
                return [Segment(*out[4 * index : 4 * index + 4]) for index in range(count)]
            most = count

    def present_bytes(self, address: int, size: int) -> int:
        """Return how many bytes of an address range are backed by memory. The range must be inside one segment."""
        return int(self._library.colocate_vmm_present(ctypes.c_uint64(address), ctypes.c_uint64(size)))

    def absent_bytes(self, device: int) -> tuple[int, int]:
        """Return how many bytes of a device's segments lack memory behind them, and how many of these are tensors'."""
        absent, used = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.colocate_vmm_absent(ctypes.c_int(device), ctypes.byref(absent), ctypes.byref(used))
        return absent.value, used.value

    def take_memory(self, device: int, chunks: Sequence[Chunk]) -> None:
        """Wait until the device has finished all work, then free the memory of chunks."""
        flat = [number for chunk in chunks for number in (chunk.address, chunk.serial, chunk.used)]
        self._call("take", device, (ctypes.c_uint64 * len(flat))(*flat), ctypes.c_size_t(len(chunks)))

    def give_memory(self, device: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Allocate memory again for all chunks in ranges of address and size. On an error, no chunk gets memory."""
        flat = [number for stretch in ranges for number in stretch]
        self._call("give", device, (ctypes.c_uint64 * len(flat))(*flat), ctypes.c_size_t(len(ranges)))

    def _call(self, name: str, device: int, *arguments: Any) -> None:
        call = ctypes.c_char_p()
        code = getattr(self._library, f"colocate_vmm_{name}")(ctypes.c_int(device), *arguments, ctypes.byref(call))
        if code:
            text = self._library.colocate_vmm_error(ctypes.c_int(code))
            raise VmmError(f"{(call.value or b'').decode()}: {text.decode(errors='replace')}")

    @classmethod
    def get_active(cls) -> Vmm | None:
        """Return this process's `Vmm`, or None if there is none yet."""
        return None if cls._instance is None else cls._instance[0]

    @classmethod
    def get_allocator(cls) -> tuple[Vmm, Any]:
        """Return this process's `Vmm`, and a torch allocator that uses the library. The first call creates both.

        Raises:
            CapabilityError: This machine can't compile or load the library.
        """
        with cls._lock:  # A process has one instance, because the library records all memory that torch gets.
            if cls._instance is None:
                with tempfile.TemporaryDirectory(prefix="colocate-vmm-") as folder:
                    path = compile_library(Path(folder))
                    try:
                        vmm = cls(path)
                    except (OSError, VmmError) as error:
                        raise CapabilityError(f'sleep="vmm" can\'t be had here: {error}') from error
                    torch = find_imported("torch")
                    cls._instance = vmm, torch.cuda.memory.CUDAPluggableAllocator(str(path), _ALLOC, _FREE)
            return cls._instance


def compile_library(folder: Path) -> Path:
    """Compile `vmm.c` with this machine's compiler, and return the library's path.

    Raises:
        CapabilityError: There is no compiler, or it failed.
    """
    compiler, path = shutil.which("cc"), folder / "vmm.so"
    if compiler is None:
        raise CapabilityError(
            'sleep="vmm" needs a C compiler on the machine of the worker, called cc: install one, as in `apt-get '
            "install gcc libc6-dev`, or leave the option out: then memory has other addresses after a sleep"
        )
    command = [compiler, "-O2", "-fPIC", "-shared", str(SOURCE), "-o", str(path), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CapabilityError(
            f'sleep="vmm": {compiler} can\'t compile what it needs: {done.stderr.strip() or done.returncode}'
        )
    return path


class MappedStorages:
    """Frees and restores the memory of storages at fixed addresses (`sleep="vmm"`), in chunks of device memory.

    A chunk is freed as soon as it contains only sleeping storages and blocks that torch has freed and never reuses. So
    memory of small tensors, which torch packs together, may stay until their neighbours sleep.
    """

    def __init__(self, device: str) -> None:
        """Start without sleeping storages. `device` is the device's name in torch."""
        self._device = device
        self._sleeping: set[int] = set()  # The addresses of sleeping storages.

    def can_manage(self, storage: Any) -> bool:
        """Return whether a storage's memory can be freed and restored at the same address."""
        vmm = Vmm.get_active()
        return vmm is not None and vmm.present_bytes(storage.data_ptr(), 1) > 0

    def take_memory(self, storages: Collection[Any]) -> int:
        """Free the memory of storages, and return how many of their bytes couldn't be freed.

        Memory that the driver fails to free stays; the next use of the device raises that error.
        """
        vmm = Vmm.get_active()
        if vmm is None or not storages:
            return 0
        self._sleeping.update(storage.data_ptr() for storage in storages)
        with contextlib.suppress(VmmError):
            vmm.take_memory(number_of(self._device), list(self._unused_chunks(vmm)))
        return sum(vmm.present_bytes(storage.data_ptr(), storage.nbytes()) for storage in storages)

    def give_memory(self, storages: Collection[tuple[Any, int]]) -> None:
        """Restore the memory of storages with the given sizes. On an error, no storage gets memory."""
        vmm = Vmm.get_active()
        if vmm is None or not storages:
            return
        ranges = [(storage.data_ptr(), nbytes) for storage, nbytes in storages]
        try:
            vmm.give_memory(number_of(self._device), ranges)
        except VmmError:
            if (module := in_use(self._device)) is None:
                raise
            module.empty_cache()  # Torch's cache may hold the missing memory.
            vmm.give_memory(number_of(self._device), ranges)
        self._sleeping.difference_update(address for address, _ in ranges)

    def _unused_chunks(self, vmm: Vmm) -> Iterator[Chunk]:
        """Yield the chunks of mapped memory that hold only sleeping storages."""
        # Read the segments before the snapshot, so that `take_memory` ignores a segment that torch replaces in between.
        segments = {segment.address: segment for segment in vmm.list_segments(number_of(self._device))}
        for snapshot in in_use(self._device).memory_snapshot():
            if (segment := segments.get(snapshot["address"])) is None:
                continue
            used: dict[int, int] = {}
            stay: set[int] = set()
            for begin, block in iterate_blocks(snapshot):
                end = begin + block["size"]
                first, last = ((address - segment.address) // segment.chunk for address in (begin, end - 1))
                if begin in self._sleeping:
                    for index in range(first, last + 1):
                        start = segment.address + index * segment.chunk
                        used[index] = used.get(index, 0) + min(end, start + segment.chunk) - max(begin, start)
                elif block["state"] != "inactive":
                    stay.update(range(first, last + 1))
            if used:  # Skip segments without sleeping storages: another thread may be placing a tensor there.
                for index in range(-(-segment.size // segment.chunk)):
                    if index not in stay:
                        yield Chunk(segment.address + index * segment.chunk, segment.serial, used.get(index, 0))


def count_absent(device: str) -> tuple[int, int]:
    """Return how many of torch's reserved bytes, and how many bytes of torch's tensors, aren't backed by memory."""
    vmm = Vmm.get_active()
    return (0, 0) if vmm is None or device == "cpu" else vmm.absent_bytes(number_of(device))


CountElsewhere: TypeAlias = Callable[[Iterable[Any]], int]
"""Returns the bytes of storages made during a constructor that don't keep their addresses.

Other threads than the constructor's have made these.
"""


@contextlib.contextmanager
def keep_addresses(device: str) -> Iterator[CountElsewhere | None]:
    """A context manager in which this thread's new tensors on a device keep their addresses across a sleep.

    Args:
        device: The device's name in torch.

    Yields:
        A function, for use after the block, that returns the bytes of storages that don't keep their addresses; None
        on the CPU.

    Raises:
        CapabilityError: The machine or the allocator doesn't support this.
    """
    if device == "cpu":  # On the CPU, addresses don't matter.
        yield None
        return
    import torch

    number = number_of(device)
    if torch.version.cuda is None:
        raise CapabilityError('sleep="vmm" is for GPUs of NVIDIA, and this torch isn\'t: install one that is for CUDA')
    vmm, allocator = Vmm.get_allocator()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if not vmm.is_supported(number):
        raise CapabilityError(f'sleep="vmm": the driver says that {device} can\'t have memory taken from its addresses')
    with torch.cuda.device(number), contextlib.ExitStack() as stack:
        # Empty the cache first, because torch keeps unused memory while a pool is in use.
        torch.cuda.empty_cache()
        serials = {segment.serial for segment in vmm.list_segments(number)}
        before, usual = torch.cuda.memory_allocated(number), _default_blocks()
        pools = [torch.cuda.MemPool(allocator.allocator())]
        stack.callback(pools.clear)  # Dropping the pool returns the pool's freed memory to the device.
        stack.enter_context(torch.cuda.use_mem_pool(pools[0], number))

        def elsewhere(storages: Iterable[Any]) -> int:
            addresses = _default_blocks() - usual
            return sum(storage.nbytes() for storage in storages if storage.data_ptr() in addresses)

        yield elsewhere
        new = {segment.serial for segment in vmm.list_segments(number)} - serials
        if torch.cuda.memory_allocated(number) > before and not new:
            raise CapabilityError(
                f'sleep="vmm": torch has not asked for the memory on {device} in the way that keeps its addresses: is '
                "there another allocator, by PYTORCH_CUDA_ALLOC_CONF say? Leave that out, or sleep="
            )


def iterate_blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the address and the description of each block of a segment in the allocator's snapshot."""
    begin = segment["address"]
    for block in segment["blocks"]:
        yield begin, block
        begin += block["size"]


def _default_blocks() -> frozenset[int]:
    """Return the addresses of torch's allocated blocks, without blocks in private pools (see `keep_addresses`)."""
    torch = find_imported("torch")
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # An allocator that replaces torch's has no snapshot, and no pool will be used.
        return frozenset()
    usual = [segment for segment in segments if tuple(segment["segment_pool_id"]) == (0, 0)]
    return frozenset(
        begin for segment in usual for begin, block in iterate_blocks(segment) if block["state"] == "active_allocated"
    )
