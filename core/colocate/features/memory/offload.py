"""Copies of sleeping memory: device memory is copied to pinned host memory, and host memory to a file.

A sleep frees only the memory of storages: tensors, storages, views and tied weights stay the same objects. Addresses
change, except with `sleep="vmm"` (`vmm.py`). Until the wake nothing may be computed with such tensors.

Torch pins powers of two, one page after the other. Here several threads touch the pages first, and the pages are huge
if the kernel supports these, which takes a fifth of the time (docs/internals/gpu.md).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import attrs

from colocate._devices.copies import SideStream
from colocate._devices.cuda_driver import DriverError, get_driver
from colocate._system.imported import find_imported
from colocate._system.jobs import map_on_threads
from colocate._system.libc import LARGE_PAGE_BYTES, advise_large
from colocate._system.numbers import format_size
from colocate._system.room import SpillFile, read_free_memory
from colocate.features.memory.vmm import MappedStorages
from colocate.gpus import in_use
from colocate.worker.holdings import WeakStorage, get_device_name

GRAIN = 512  # The alignment of copies in their store, in bytes.
_THREADS = 8
_TOUCHED_BYTES = 64 << 20
_WIPE_ON_FORK = 18  # The number of MADV_WIPEONFORK, which Linux has since 4.14.
HOST = "cpu"

Key: TypeAlias = int
"""The key of a storage while a reference to the storage exists: `storage._cdata`."""


class ResizedStorages:
    """Frees the memory of storages by resizing storages to zero bytes. Torch can reuse the memory."""

    def can_manage(self, storage: Any) -> bool:
        """Return whether a storage can be resized, unlike storages of other libraries or those exported as arrays."""
        # Ignore `is_shared` for storages on a device, because torch reports all of these as shared.
        return bool(storage.resizable()) and not (device_of(storage) == HOST and storage.is_shared())

    def take_memory(self, storages: Collection[Any]) -> int:
        """Free the memory of storages, and return how many of their bytes couldn't be freed (always 0)."""
        for storage in storages:
            storage.resize_(0)
        return 0

    def give_memory(self, storages: Collection[tuple[Any, int]]) -> None:
        """Restore the memory of storages with the given sizes. On an error, no storage gets memory."""
        filled: list[Any] = []
        try:
            for storage, nbytes in storages:
                if storage.nbytes() != nbytes:
                    if not storage.resizable():
                        raise RuntimeError(
                            "an array was made of a tensor while that slept (`tensor.numpy()`), so torch can't give it "
                            "its memory again; restart the group from its checkpoint"
                        )
                    storage.resize_(nbytes)
                    filled.append(storage)
                    if device_of(storage) == HOST:  # Use huge pages, because small pages take most of a wake's time.
                        start = storage.data_ptr()
                        advise_large(start, start + storage.nbytes(), mmap.MADV_HUGEPAGE)
        except RuntimeError:
            self.take_memory(filled)
            raise


@attrs.define(eq=False)
class _Copy:
    """The copy of a sleeping storage's contents.

    Attributes:
        nbytes: The size.
        store: The store with the copy; None if the contents were discarded.
        start: The offset in `store`.
        storage: The storage while it has no memory; None afterwards, so that this record doesn't keep it alive.
        reference: A weak reference to the storage.
        backing: The way in which the storage loses its memory.
    """

    nbytes: int
    store: _ByteStore | None
    start: int
    storage: Any
    reference: WeakStorage
    backing: ResizedStorages | MappedStorages


class Offload:
    """Copies the storages of a worker for a sleep, frees their memory, and restores both for a wake."""

    def __init__(
        self,
        device: str,
        free: Callable[[], int] = read_free_memory,
        spill_dir: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._device = device
        self._spill_dir = spill_dir
        self._file: SpillFile | None = None
        self._pinned = PinnedMemory(device, free)
        self._copies: dict[Key, _Copy] = {}
        self._side_stream = SideStream(device)
        self._backings: tuple[ResizedStorages | MappedStorages, ...] = (MappedStorages(device), ResizedStorages())

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the process's own memory that are reserved for copies, in use or not."""
        return self._pinned.own_bytes

    def spill_file(self) -> SpillFile:
        """Return the file for copies of host memory. The first call creates the file."""
        if self._file is None:
            self._file = SpillFile.create_somewhere(self._spill_dir())
        return self._file

    def copy_out(
        self, storages: Mapping[Key, Any], emptied: Mapping[Key, Any] = MappingProxyType({})
    ) -> Mapping[Key, _Copy]:
        """Copy storages to host memory or to the file, and return the copies.

        The storages keep their memory until `offload_copies`. To abandon the copies, drop them.

        Args:
            storages: The storages to copy.
            emptied: Storages with contents to discard, with or without memory; a wake fills these with zeros.

        Raises:
            MemoryError: The host has no room. Nothing has changed.
            OSError: The disk has no room.
            ValueError: There is no folder for the file.
        """
        for key in [key for key, former in self._copies.items() if former.reference.is_expired()]:
            del self._copies[key]
        by_place: dict[_ByteStore, list[Key]] = {}
        for key, storage in storages.items():
            by_place.setdefault(self.spill_file() if device_of(storage) == HOST else self._pinned, []).append(key)
        copies: dict[Key, _Copy] = {}
        with self._copying():
            for store, keys in by_place.items():
                ranges = [(copy.start, copy.nbytes) for copy in self._copies.values() if copy.store is store]
                starts = find_gaps(ranges, [storages[key].nbytes() for key in keys])
                for key, start in zip(keys, starts, strict=True):
                    copies[key] = self._make_copy(storages[key], store, start)
                store.grow(max(copies[key].start + copies[key].nbytes for key in keys))
                for key in keys:
                    store.write_from(_byte_view(storages[key]), copies[key].start)
        for key, storage in emptied.items():
            if (former := self._copies.get(key)) is not None and self.is_away(key):
                copies[key] = attrs.evolve(former, store=None)
            else:
                copies[key] = self._make_copy(storage, None, 0)
        return copies

    def is_away(self, key: Key) -> bool:
        """Return whether a storage sleeps."""
        copy = self._copies.get(key)
        return copy is not None and copy.storage is not None

    def can_release(self, storage: Any) -> bool:
        """Return whether the memory of an awake storage can be freed."""
        return any(backing.can_manage(storage) for backing in self._backings)

    def keeps_address(self, storage: Any) -> bool:
        """Return whether an awake storage will have the same address after a sleep."""
        return any(isinstance(backing, MappedStorages) and backing.can_manage(storage) for backing in self._backings)

    def offload_copies(self, copies: Mapping[Key, _Copy]) -> int:
        """Free the memory of copied storages, and return how many of their bytes couldn't be freed.

        The device first finishes all its work, and the memory becomes available to other users of the device.

        Raises:
            RuntimeError: A storage can't be freed. All storages have their memory again.
        """
        new = {key: copy for key, copy in copies.items() if not self.is_away(key)}
        self._copies.update(copies)  # Record the copies first, because `_take_memory` frees the originals.
        try:
            retained = self._take_memory(new.values())
        except RuntimeError:
            self.restore_storages(new)
            self.forget_copies(new)
            raise
        self._release_cache()
        return retained

    def restore_storages(self, keys: Collection[Key]) -> None:
        """Restore the memory and the contents of sleeping storages. The copies stay.

        Raises:
            MemoryError: There isn't enough memory. Nothing has changed.
            OSError: The file can't be read. Nothing has changed.
        """
        restored: list[_Copy] = []
        try:
            for backing in self._backings:
                some = [copy for copy in (self._copies[key] for key in keys) if copy.backing is backing]
                backing.give_memory([(copy.storage, copy.nbytes) for copy in some])
                restored += some
            with self._copying():
                for copy in restored:
                    if copy.store is None:
                        _byte_view(copy.storage).zero_()
                    else:
                        copy.store.read_into(_byte_view(copy.storage), copy.start)
        except (OSError, RuntimeError) as error:  # `torch.OutOfMemoryError` is a RuntimeError.
            self._take_memory(restored)
            self._release_cache()
            if isinstance(error, OSError):
                raise
            size = sum(self._copies[key].nbytes for key in keys)
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"{format_size(size)} are needed on {self._device}: {reason}") from error
        for copy in restored:
            copy.storage = None

    def forget_copies(self, keys: Collection[Key]) -> None:
        """Drop the copies of storages that are awake or were garbage-collected."""
        for key in keys:
            del self._copies[key]

    def undo_restore(self, keys: Iterable[Key]) -> None:
        """Undo `restore_storages`: free the storages' memory again. The copies must still exist."""
        copies = [self._copies[key] for key in keys]
        for copy in copies:
            copy.storage = copy.reference.get_storage()
        self._take_memory(copies)
        self._release_cache()

    def close(self) -> None:
        """Drop all copies and free their memory. The contents of sleeping storages are lost."""
        self._copies.clear()
        self._pinned.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _make_copy(self, storage: Any, kept: _ByteStore | None, start: int) -> _Copy:
        backing = next(candidate for candidate in self._backings if candidate.can_manage(storage))
        return _Copy(storage.nbytes(), kept, start, storage, WeakStorage(storage), backing)

    def _take_memory(self, copies: Collection[_Copy]) -> int:
        return sum(
            backing.take_memory([copy.storage for copy in copies if copy.backing is backing])
            for backing in self._backings
        )

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """A context manager that runs copies on the side stream, and waits for the copies at the end."""
        module = in_use(self._device)
        # The side stream first waits for running kernels, because these may still use memory that was just freed.
        with contextlib.nullcontext() if module is None else self._side_stream.use_synchronized(module):
            yield

    def _release_cache(self) -> None:
        """Release torch's cached memory to other users of the device."""
        if (module := in_use(self._device)) is not None:
            with contextlib.suppress(RuntimeError):  # Torch raises while another thread captures a CUDA graph.
                module.empty_cache()


def _byte_view(storage: Any) -> Any:
    torch = find_imported("torch")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def device_of(storage: Any) -> str:
    """Return torch's name for a storage's device."""
    return get_device_name(storage.device)


class _ByteStore(Protocol):
    """A store for the bytes of sleeping storages: pinned memory or a file."""

    def grow(self, nbytes: int) -> None:
        """Grow to at least `nbytes` bytes.

        Raises:
            OSError: There is no room.
            MemoryError: There is no room.
        """
        ...

    def write_from(self, view: Any, start: int) -> None: ...

    def read_into(self, view: Any, start: int) -> None: ...


def find_gaps(taken: Iterable[tuple[int, int]], sizes: Iterable[int]) -> list[int]:
    """Return an offset for each new piece, in the first gap between existing pieces that is large enough.

    Args:
        taken: Offset and size of each existing piece.
        sizes: The sizes of the new pieces.
    """
    gaps, end = [], 0
    for start, nbytes in sorted(taken):
        gaps.append((end, start - end))
        end = max(end, start + _round_up(nbytes))
    gaps = [gap for gap in gaps if gap[1] > 0]
    starts = []
    for needed in map(_round_up, sizes):
        at = next((at for at, (_, room) in enumerate(gaps) if room >= needed), None)
        if at is None:
            starts.append(end)
            end += needed
            continue
        start, room = gaps[at]
        starts.append(start)
        gaps[at : at + 1] = [(start + needed, room - needed)] if room > needed else []
    return starts


class PinnedMemory:
    """Pinned host memory for copies of device memory. The memory grows when needed, and never shrinks."""

    def __init__(self, device: str, free: Callable[[], int]) -> None:
        """Start without pinned memory for `device`. The function `free` returns the free bytes of the host."""
        self._device = device
        self._free = free
        self._regions: list[Any] = []  # The regions in the order of their offsets.

    @property
    def own_bytes(self) -> int:
        """The bytes in this process's own memory, without torch's pinned memory, which the CUDA driver shares."""
        return sum(region.numel() for region in list(self._regions) if not region.untyped_storage().resizable())

    def grow(self, nbytes: int) -> None:
        """Grow to at least `nbytes` bytes.

        Raises:
            MemoryError: The host has too little free memory.
        """
        present = sum(region.numel() for region in self._regions)
        more = -(-(nbytes - present) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        if more <= 0:
            return
        problem = f"{format_size(more)} of the host's memory are needed, to be pinned"
        if present:
            problem += f", beside the {format_size(present)} that are"
        if more > (free := self._free()):
            raise MemoryError(f"{problem}: {format_size(free)} are free")
        try:
            self._regions += allocate_pinned(more, self._device)
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"{problem}: {str(error).partition(chr(10))[0]}") from error

    def write_from(self, view: Any, start: int) -> None:
        """Copy a tensor of bytes to the offset `start`, asynchronously."""
        for part, piece in self._walk_regions(view, start):
            piece.copy_(part, non_blocking=True)

    def read_into(self, view: Any, start: int) -> None:
        """Fill a tensor of bytes from the offset `start`, asynchronously."""
        for part, piece in self._walk_regions(view, start):
            part.copy_(piece, non_blocking=True)

    def close(self) -> None:
        """Free the pinned memory."""
        self._regions = []

    def _walk_regions(self, view: Any, start: int) -> Iterator[tuple[Any, Any]]:
        done, begin = 0, 0
        for region in self._regions:
            first = start + done - begin
            begin += region.numel()
            if done < view.numel() and first < region.numel():
                piece = region[first : first + view.numel() - done]
                yield view[done : done + piece.numel()], piece
                done += piece.numel()


class _Pages(mmap.mmap):
    """A mapping of anonymous pages that stay pinned until the mapping is deleted."""

    pinned_by: Any = None
    address: int

    def __del__(self) -> None:
        # Unpin here, because a weak reference's callback would run after the mapping is deleted.
        if self.pinned_by is not None:
            with contextlib.suppress(DriverError):  # Unpinning fails if the CUDA context is lost.
                self.pinned_by.unpin(self.address)


def allocate_pinned(nbytes: int, device: str) -> list[Any]:
    """Return new pinned host memory, as tensors of bytes."""
    if in_use(device) is None:
        return [_map_pages(nbytes)[1]]
    if (cuda := get_driver(device)) is not None:
        pages, memory = _map_pages(nbytes)
        # The parts are small, because torch itself would use several threads for a larger tensor.
        map_on_threads(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(_TOUCHED_BYTES), _THREADS)
        with contextlib.suppress(DriverError):  # Pinning fails in some virtual machines, without side effects.
            cuda.pin(memory.data_ptr(), nbytes)
            pages.pinned_by, pages.address = cuda, memory.data_ptr()
            return [memory]
        del pages, memory
    torch, regions = find_imported("torch"), []
    while nbytes:  # Use several pieces, because torch rounds the size of a piece up to a power of two.
        regions.append(torch.empty(1 << (nbytes.bit_length() - 1), dtype=torch.uint8, pin_memory=True))
        nbytes -= regions[-1].numel()
    return regions


def _map_pages(nbytes: int) -> tuple[_Pages, Any]:
    torch = find_imported("torch")
    pages = _Pages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The kernel may not support huge pages.
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A fork must see zeros here, because copy-on-write could replace the pages that the device uses.
    # The addresses stay mapped in the fork, because Python may garbage-collect the objects there.
    try:
        pages.madvise(_WIPE_ON_FORK)
    except OSError:  # gVisor doesn't support MADV_WIPEONFORK.
        pages.madvise(mmap.MADV_DONTFORK)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
