"""Memory of NVIDIA GPUs whose addresses stay when it is taken away: `vmm.c`, compiled where it is first needed.

Torch's caching allocator asks `vmm.c` for what it hands out in a block of `kept_addresses`, which is C for that reason:
it asks under its lock, and Python in there would wait for Python that waits for the lock.
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

from colocate._system.imported import imported
from colocate.errors import CapabilityError
from colocate.gpus import in_use, number_of

SOURCE = Path(__file__).with_name("vmm.c")
_ALLOC, _FREE = "colocate_vmm_alloc", "colocate_vmm_free"


class VmmError(RuntimeError):
    """The driver refuses."""


@attrs.frozen
class Segment:
    """A range of addresses in chunks.

    Attributes:
        address: Where it begins.
        size: How long it is.
        chunk: How long its chunks are; the last one may be shorter.
        serial: Its number: a later segment may have the same address.
    """

    address: int
    size: int
    chunk: int
    serial: int


@attrs.frozen
class Chunk:
    """What memory is taken from.

    Attributes:
        address: Where it begins.
        serial: Its segment's.
        used: The bytes of tensors that lie in it.
    """

    address: int
    serial: int
    used: int


class Vmm:
    """`vmm.c` of this process, with the driver. Devices go by torch's numbers."""

    _made: ClassVar[tuple[Vmm, Any] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, driver: str = "libcuda.so.1") -> None:
        """Load it."""
        self._library = ctypes.CDLL(str(path))
        self._library.colocate_vmm_segments.restype = ctypes.c_size_t
        self._library.colocate_vmm_present.restype = ctypes.c_uint64
        for name in ("load", "error"):
            getattr(self._library, f"colocate_vmm_{name}").restype = ctypes.c_char_p
        missing = self._library.colocate_vmm_load(driver.encode())
        if missing is not None:
            raise VmmError(f"{driver}: {missing.decode(errors='replace')}")

    def supported(self, device: int) -> bool:
        """Whether a device can do it."""
        found = ctypes.c_int()
        self._call("supported", device, ctypes.byref(found))
        return bool(found.value)

    def segments(self, device: int) -> list[Segment]:
        """Return the segments of a device."""
        most = 64
        while True:
            out = (ctypes.c_uint64 * (4 * most))()
            count = self._library.colocate_vmm_segments(ctypes.c_int(device), out, ctypes.c_size_t(most))
            if count <= most:
                return [Segment(*out[4 * index : 4 * index + 4]) for index in range(count)]
            most = count

    def present(self, address: int, size: int) -> int:
        """Of a range in one segment, the bytes that have memory."""
        return int(self._library.colocate_vmm_present(ctypes.c_uint64(address), ctypes.c_uint64(size)))

    def absent(self, device: int) -> tuple[int, int]:
        """Of a device, the bytes of addresses that have no memory, and those of them that are tensors'."""
        absent, used = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.colocate_vmm_absent(ctypes.c_int(device), ctypes.byref(absent), ctypes.byref(used))
        return absent.value, used.value

    def take(self, device: int, chunks: Sequence[Chunk]) -> None:
        """Take the memory from chunks, when the device is through with what it has to do."""
        flat = [number for chunk in chunks for number in (chunk.address, chunk.serial, chunk.used)]
        self._call("take", device, (ctypes.c_uint64 * len(flat))(*flat), ctypes.c_size_t(len(chunks)))

    def give(self, device: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Give memory to all chunks of some ranges, by address and size, or to none."""
        flat = [number for each in ranges for number in each]
        self._call("give", device, (ctypes.c_uint64 * len(flat))(*flat), ctypes.c_size_t(len(ranges)))

    def _call(self, name: str, device: int, *arguments: Any) -> None:
        call = ctypes.c_char_p()
        code = getattr(self._library, f"colocate_vmm_{name}")(ctypes.c_int(device), *arguments, ctypes.byref(call))
        if code:
            text = self._library.colocate_vmm_error(ctypes.c_int(code))
            raise VmmError(f"{(call.value or b'').decode()}: {text.decode(errors='replace')}")

    @classmethod
    def in_use(cls) -> Vmm | None:
        """Return the allocator of this process, where some of its memory may be its."""
        return None if cls._made is None else cls._made[0]

    @classmethod
    def made(cls) -> tuple[Vmm, Any]:
        """Return the one of this process, and torch's allocator of it.

        Raises:
            CapabilityError: It can't be had on this machine.
        """
        with cls._lock:  # there must be one: it knows what it has given to torch
            if cls._made is None:
                with tempfile.TemporaryDirectory(prefix="colocate-vmm-") as folder:
                    path = compiled(Path(folder))
                    try:
                        vmm = cls(path)
                    except (OSError, VmmError) as error:
                        raise CapabilityError(f'sleep="vmm" can\'t be had here: {error}') from error
                    torch = imported("torch")
                    cls._made = vmm, torch.cuda.memory.CUDAPluggableAllocator(str(path), _ALLOC, _FREE)
            return cls._made


def compiled(folder: Path) -> Path:
    """Compile `vmm.c` with this machine's compiler."""
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


class Mapped:
    """Storages that keep their addresses (`vmm`): what goes is chunks of the device's memory.

    A chunk goes as soon as nothing is in it but storages that sleep, and what torch has let go of: nobody gets that any
    more. So of small tensors, which torch packs, the memory may stay until those beside them sleep.
    """

    def __init__(self, device: str) -> None:
        """Args: device: As torch calls it."""
        self._device = device
        self._asleep: set[int] = set()  # where the storages begin

    def has(self, storage: Any) -> bool:
        """Whether a storage lies where memory can be taken from."""
        vmm = Vmm.in_use()
        return vmm is not None and vmm.present(storage.data_ptr(), 1) > 0

    def take(self, storages: Collection[Any]) -> int:
        """Take the memory from storages, and return how much of it the device keeps all the same, in bytes.

        What the driver doesn't let go of stays; it tells an error to whoever uses the device next.
        """
        vmm = Vmm.in_use()
        if vmm is None or not storages:
            return 0
        self._asleep.update(storage.data_ptr() for storage in storages)
        with contextlib.suppress(VmmError):
            vmm.take(number_of(self._device), list(self._unused(vmm)))
        return sum(vmm.present(storage.data_ptr(), storage.nbytes()) for storage in storages)

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """Give memory to storages, of such sizes: to all, or to none."""
        vmm = Vmm.in_use()
        if vmm is None or not storages:
            return
        ranges = [(storage.data_ptr(), nbytes) for storage, nbytes in storages]
        try:
            vmm.give(number_of(self._device), ranges)
        except VmmError:
            if (module := in_use(self._device)) is None:
                raise
            module.empty_cache()  # torch may have it, for others
            vmm.give(number_of(self._device), ranges)
        self._asleep.difference_update(address for address, _ in ranges)

    def _unused(self, vmm: Vmm) -> Iterator[Chunk]:
        """Yield the chunks of segments with storages that sleep in which nothing is awake."""
        # Their order: a segment that torch has let go of in between, and another one made there, has another serial.
        segments = {segment.address: segment for segment in vmm.segments(number_of(self._device))}
        for found in in_use(self._device).memory_snapshot():
            if (segment := segments.get(found["address"])) is None:
                continue
            used: dict[int, int] = {}
            stay: set[int] = set()
            for begin, block in blocks(found):
                end = begin + block["size"]
                first, last = ((each - segment.address) // segment.chunk for each in (begin, end - 1))
                if begin in self._asleep:
                    for index in range(first, last + 1):
                        start = segment.address + index * segment.chunk
                        used[index] = used.get(index, 0) + min(end, start + segment.chunk) - max(begin, start)
                elif block["state"] != "inactive":
                    stay.update(range(first, last + 1))
            if used:  # else it is somebody else's, who may be about to make something there
                for index in range(-(-segment.size // segment.chunk)):
                    if index not in stay:
                        yield Chunk(segment.address + index * segment.chunk, segment.serial, used.get(index, 0))


def absent(device: str) -> tuple[int, int]:
    """Return what torch counts and isn't there: of a device's memory, and of the tensors in it, in bytes."""
    vmm = Vmm.in_use()
    return (0, 0) if vmm is None or device == "cpu" else vmm.absent(number_of(device))


Elsewhere: TypeAlias = Callable[[Iterable[Any]], int]
"""Tells how many bytes of some storages don't keep their addresses, and were made while a constructor ran.

Other threads have made them.
"""


@contextlib.contextmanager
def kept_addresses(device: str) -> Iterator[Elsewhere | None]:
    """A block in which what its thread makes on a device gets addresses that it keeps when it sleeps.

    Args:
        device: As torch calls it.

    Yields:
        What tells, when the block is over, what doesn't keep its own of what was made meanwhile; None where all does.

    Raises:
        CapabilityError: It can't be had on this machine.
    """
    if device == "cpu":  # nothing remembers addresses there
        yield None
        return
    import torch

    number = number_of(device)
    if torch.version.cuda is None:
        raise CapabilityError('sleep="vmm" is for GPUs of NVIDIA, and this torch isn\'t: install one that is for CUDA')
    vmm, allocator = Vmm.made()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if not vmm.supported(number):
        raise CapabilityError(f'sleep="vmm": the driver says that {device} can\'t have memory taken from its addresses')
    with torch.cuda.device(number), contextlib.ExitStack() as stack:
        torch.cuda.empty_cache()  # where a pool is used, torch doesn't give back what it has, also when it needs more
        known = {segment.serial for segment in vmm.segments(number)}
        before, usual = torch.cuda.memory_allocated(number), _usual()
        pools = [torch.cuda.MemPool(allocator.allocator())]
        stack.callback(pools.clear)  # last: what is let go of in it goes back to the device
        stack.enter_context(torch.cuda.use_mem_pool(pools[0], number))

        def elsewhere(storages: Iterable[Any]) -> int:
            made = _usual() - usual
            return sum(storage.nbytes() for storage in storages if storage.data_ptr() in made)

        yield elsewhere
        new = {segment.serial for segment in vmm.segments(number)} - known
        if torch.cuda.memory_allocated(number) > before and not new:
            raise CapabilityError(
                f'sleep="vmm": torch has not asked for the memory on {device} in the way that keeps its addresses: is '
                "there another allocator, by PYTORCH_CUDA_ALLOC_CONF say? Leave that out, or sleep="
            )


def blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The blocks of a segment that torch's allocator tells of, and where they begin: they lie side by side."""
    begin = segment["address"]
    for block in segment["blocks"]:
        yield begin, block
        begin += block["size"]


def _usual() -> frozenset[int]:
    """Where what torch has handed out begins, but of memory that it has for somebody alone, as these pools have."""
    torch = imported("torch")
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator is in the place of torch's: nothing will be in a pool
        return frozenset()
    usual = [each for each in segments if tuple(each["segment_pool_id"]) == (0, 0)]
    return frozenset(begin for each in usual for begin, block in blocks(each) if block["state"] == "active_allocated")
