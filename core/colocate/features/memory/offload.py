"""Copies of a worker's sleeping memory: a device's in pinned memory of the host, the host's in a file.

Storages lose their memory and get it again: tensors and storages stay the same objects, and so do views and tied
weights. Addresses change, except with `sleep="vmm"` (`vmm.py`). Meanwhile nothing may be computed with such tensors.

Torch pins powers of two, one page after the other. Here several threads touch the pages first, and the pages are huge
if the kernel supports these: that takes a fifth of the time (docs/internals/gpu.md).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import attrs

from colocate._devices.copies import SideStream
from colocate._devices.cuda_driver import DriverError, driver
from colocate._system.imported import imported
from colocate._system.jobs import by_threads
from colocate._system.libc import LARGE_PAGE_BYTES, advise_large
from colocate._system.numbers import size_text
from colocate._system.room import SpillFile, free_memory
from colocate.features.memory.vmm import Mapped
from colocate.gpus import in_use
from colocate.worker.holdings import WeakStorage, name_of

GRAIN = 512  # bytes; the alignment of pieces
_THREADS = 8
_TOUCHED_BYTES = 64 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14
HOST = "cpu"

Key: TypeAlias = int
"""The key of a storage while a reference to the storage exists: `storage._cdata`."""


class Resized:
    """Storages that are resized to zero bytes. The memory returns to torch, for other tensors."""

    def has(self, storage: Any) -> bool:
        """Whether a storage can be resized: not one from another library, nor one exported as an array."""
        # torch always calls a device's storage shared.
        return bool(storage.resizable()) and not (place_of(storage) == HOST and storage.is_shared())

    def take(self, storages: Collection[Any]) -> int:
        """Free the memory of storages; return the bytes that stay allocated: 0."""
        for storage in storages:
            storage.resize_(0)
        return 0

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """Give memory of the given sizes to storages without memory: to all, or to none."""
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
                    if place_of(storage) == HOST:  # with small pages most of a wake's time goes to the kernel
                        start = storage.data_ptr()
                        advise_large(start, start + storage.nbytes(), mmap.MADV_HUGEPAGE)
        except RuntimeError:
            self.take(filled)
            raise


@attrs.define(eq=False)
class _Copy:
    """A copy of a storage's contents.

    Attributes:
        nbytes: The size.
        kept: The place of the copy; None if the contents were discarded.
        start: The offset in `kept`.
        storage: The storage, while without memory; None afterwards, so that this record doesn't keep it alive.
        reference: A weak reference to the storage.
        backing: The way in which the storage loses its memory.
    """

    nbytes: int
    kept: _Kept | None
    start: int
    storage: Any
    reference: WeakStorage
    backing: Resized | Mapped


class Offload:
    """Storages of a worker that sleep, and their copies."""

    def __init__(
        self, device: str, free: Callable[[], int] = free_memory, spill_dir: Callable[[], str | None] = lambda: None
    ) -> None:
        self._device = device
        self._spill_dir = spill_dir
        self._file: SpillFile | None = None
        self._pinned = Pinned(device, free)
        self._copies: dict[Key, _Copy] = {}
        self._side = SideStream(device)
        self._backings: tuple[Resized | Mapped, ...] = (Mapped(device), Resized())

    @property
    def pinned(self) -> int:
        """Bytes of the process's own memory that are reserved for copies, in use or not."""
        return self._pinned.own

    def file(self) -> SpillFile:
        """The file for the host's memory, created at first use."""
        if self._file is None:
            self._file = SpillFile.somewhere(self._spill_dir())
        return self._file

    def write(
        self, storages: Mapping[Key, Any], emptied: Mapping[Key, Any] = MappingProxyType({})
    ) -> Mapping[Key, _Copy]:
        """Copy storages to the host or the file, and return the copies.

        The storages keep their memory until `put_away`. Copies are abandoned by dropping them.

        Args:
            storages: The storages to copy.
            emptied: Storages with contents to discard, with or without memory: they will come back as zeros.

        Raises:
            MemoryError: The host has no room: nothing has changed.
            OSError: The disk has no room.
            ValueError: There is no folder for the file.
        """
        for key in [key for key, former in self._copies.items() if former.reference.expired()]:
            del self._copies[key]
        by_place: dict[_Kept, list[Key]] = {}
        for key, storage in storages.items():
            by_place.setdefault(self.file() if place_of(storage) == HOST else self._pinned, []).append(key)
        copies: dict[Key, _Copy] = {}
        with self._copying():
            for store, keys in by_place.items():
                ranges = [(copy.start, copy.nbytes) for copy in self._copies.values() if copy.kept is store]
                starts = starts_beside(ranges, [storages[key].nbytes() for key in keys])
                for key, start in zip(keys, starts, strict=True):
                    copies[key] = self._copy(storages[key], store, start)
                store.grow(max(copies[key].start + copies[key].nbytes for key in keys))
                for key in keys:
                    store.write(_view(storages[key]), copies[key].start)
        for key, storage in emptied.items():
            if (former := self._copies.get(key)) is not None and self.away(key):
                copies[key] = attrs.evolve(former, kept=None)
            else:
                copies[key] = self._copy(storage, None, 0)
        return copies

    def away(self, key: Key) -> bool:
        """Whether a storage sleeps."""
        copy = self._copies.get(key)
        return copy is not None and copy.storage is not None

    def can_take(self, storage: Any) -> bool:
        """Whether the memory of an awake storage can be freed."""
        return any(backing.has(storage) for backing in self._backings)

    def keeps_address(self, storage: Any) -> bool:
        """Whether an awake storage keeps the same address across a sleep."""
        return any(isinstance(backing, Mapped) and backing.has(storage) for backing in self._backings)

    def put_away(self, copies: Mapping[Key, _Copy]) -> int:
        """Free the memory of copied storages; return the bytes that the device keeps nonetheless.

        Other users of the device can take that memory: for this the device first finishes all its work.

        Raises:
            RuntimeError: A storage can't be freed: all have their memory again.
        """
        new = {key: copy for key, copy in copies.items() if not self.away(key)}
        self._copies.update(copies)  # first: from here on the copies are the only ones
        try:
            retained = self._take(new.values())
        except RuntimeError:
            self.bring_back(new)
            self.let_go(new)
            raise
        self._give_back()
        return retained

    def bring_back(self, keys: Collection[Key]) -> None:
        """Give storages their memory and contents; the copies stay.

        Raises:
            MemoryError: There isn't enough memory: nothing has changed.
            OSError: The file can't be read: nothing has changed.
        """
        restored: list[_Copy] = []
        try:
            for backing in self._backings:
                some = [copy for copy in (self._copies[key] for key in keys) if copy.backing is backing]
                backing.give([(copy.storage, copy.nbytes) for copy in some])
                restored += some
            with self._copying():
                for copy in restored:
                    if copy.kept is None:
                        _view(copy.storage).zero_()
                    else:
                        copy.kept.read(_view(copy.storage), copy.start)
        except (OSError, RuntimeError) as error:  # RuntimeError includes torch.OutOfMemoryError
            self._take(restored)
            self._give_back()
            if isinstance(error, OSError):
                raise
            size = sum(self._copies[key].nbytes for key in keys)
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"{size_text(size)} are needed on {self._device}: {reason}") from error
        for copy in restored:
            copy.storage = None

    def let_go(self, keys: Collection[Key]) -> None:
        """Drop the copies of storages that are awake or were collected."""
        for key in keys:
            del self._copies[key]

    def undo(self, keys: Iterable[Key]) -> None:
        """Put storages to sleep again that were just brought back and still have their copies."""
        copies = [self._copies[key] for key in keys]
        for copy in copies:
            copy.storage = copy.reference.storage()
        self._take(copies)
        self._give_back()

    def close(self) -> None:
        """Drop all copies and their memory. No storage sleeps afterwards."""
        self._copies.clear()
        self._pinned.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _copy(self, storage: Any, kept: _Kept | None, start: int) -> _Copy:
        backing = next(candidate for candidate in self._backings if candidate.has(storage))
        return _Copy(storage.nbytes(), kept, start, storage, WeakStorage(storage), backing)

    def _take(self, copies: Collection[_Copy]) -> int:
        return sum(
            backing.take([copy.storage for copy in copies if copy.backing is backing]) for backing in self._backings
        )

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Run a block's copies on the side stream, and synchronize at the end."""
        module = in_use(self._device)
        # New memory may just have been freed by kernels that still run: the side stream waits for these kernels.
        with contextlib.nullcontext() if module is None else self._side.after(module):
            yield

    def _give_back(self) -> None:
        """Release torch's cached memory to other users of the device."""
        if (module := in_use(self._device)) is not None:
            with contextlib.suppress(RuntimeError):  # torch can't while another thread captures a graph
                module.empty_cache()


def _view(storage: Any) -> Any:
    torch = imported("torch")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def place_of(storage: Any) -> str:
    """Return the name of a storage's device, as in torch."""
    return name_of(storage.device)


class _Kept(Protocol):
    """A place for the bytes of sleeping storages."""

    def grow(self, nbytes: int) -> None:
        """Grow to at least `nbytes` bytes.

        Raises:
            OSError: There is no room.
            MemoryError: There is no room.
        """
        ...

    def write(self, view: Any, start: int) -> None: ...

    def read(self, view: Any, start: int) -> None: ...


def starts_beside(taken: Iterable[tuple[int, int]], sizes: Iterable[int]) -> list[int]:
    """Return the offsets of new pieces, each in the first gap that fits, beside existing pieces.

    Args:
        taken: Offset and size of each existing piece.
        sizes: The sizes of the new pieces.
    """
    gaps, end = [], 0
    for start, nbytes in sorted(taken):
        gaps.append((end, start - end))
        end = max(end, start + _rounded(nbytes))
    gaps = [gap for gap in gaps if gap[1] > 0]
    starts = []
    for needed in map(_rounded, sizes):
        at = next((at for at, (_, room) in enumerate(gaps) if room >= needed), None)
        if at is None:
            starts.append(end)
            end += needed
            continue
        start, room = gaps[at]
        starts.append(start)
        gaps[at : at + 1] = [(start + needed, room - needed)] if room > needed else []
    return starts


class Pinned:
    """Pinned host memory for a device's copies: as much as has ever slept at once."""

    def __init__(self, device: str, free: Callable[[], int]) -> None:
        """Args: device: The device's name in torch. free: Returns the free bytes of the host."""
        self._device = device
        self._free = free
        self._regions: list[Any] = []  # one after the other

    @property
    def own(self) -> int:
        """The bytes that belong to the process itself: memory that torch pins is shared with the driver."""
        return sum(region.numel() for region in list(self._regions) if not region.untyped_storage().resizable())

    def grow(self, nbytes: int) -> None:
        """Grow to at least `nbytes` bytes.

        Raises:
            MemoryError: The host has less.
        """
        present = sum(region.numel() for region in self._regions)
        more = -(-(nbytes - present) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        if more <= 0:
            return
        problem = f"{size_text(more)} of the host's memory are needed, to be pinned"
        if present:
            problem += f", beside the {size_text(present)} that are"
        if more > (free := self._free()):
            raise MemoryError(f"{problem}: {size_text(free)} are free")
        try:
            self._regions += pinned(more, self._device)
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"{problem}: {str(error).partition(chr(10))[0]}") from error

    def write(self, view: Any, start: int) -> None:
        """Copy a tensor of bytes to the offset `start`, asynchronously."""
        for part, piece in self._along(view, start):
            piece.copy_(part, non_blocking=True)

    def read(self, view: Any, start: int) -> None:
        """Fill a tensor of bytes from the offset `start`, asynchronously."""
        for part, piece in self._along(view, start):
            part.copy_(piece, non_blocking=True)

    def close(self) -> None:
        """Free the memory."""
        self._regions = []

    def _along(self, view: Any, start: int) -> Iterator[tuple[Any, Any]]:
        done, begin = 0, 0
        for region in self._regions:
            first = start + done - begin
            begin += region.numel()
            if done < view.numel() and first < region.numel():
                piece = region[first : first + view.numel() - done]
                yield view[done : done + piece.numel()], piece
                done += piece.numel()


class _Pages(mmap.mmap):
    """Anonymous pages that stay pinned as long as the mapping exists."""

    pinned_by: Any = None
    address: int

    def __del__(self) -> None:
        # A weak reference's callback would come too late: after the mapping is gone.
        if self.pinned_by is not None:
            with contextlib.suppress(DriverError):  # the context is lost
                self.pinned_by.unpin(self.address)


def pinned(nbytes: int, device: str) -> list[Any]:
    """Return new pinned host memory, as tensors of bytes."""
    if in_use(device) is None:
        return [_memory(nbytes)[1]]
    if (cuda := driver(device)) is not None:
        pages, memory = _memory(nbytes)
        # Torch itself uses several threads for a tensor that is larger than a part.
        by_threads(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(_TOUCHED_BYTES), _THREADS)
        with contextlib.suppress(DriverError):  # pinning fails in some virtual machines, and leaves nothing behind
            cuda.pin(memory.data_ptr(), nbytes)
            pages.pinned_by, pages.address = cuda, memory.data_ptr()
            return [memory]
        del pages, memory
    torch, regions = imported("torch"), []
    while nbytes:  # torch pins powers of two: 64 GiB for one piece of 33
        regions.append(torch.empty(1 << (nbytes.bit_length() - 1), dtype=torch.uint8, pin_memory=True))
        nbytes -= regions[-1].numel()
    return regions


def _memory(nbytes: int) -> tuple[_Pages, Any]:
    torch = imported("torch")
    pages = _Pages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A forked process sees zeros here: otherwise copy-on-write could move the pages from under the device. The
    # addresses stay mapped in the fork, which may collect the objects there.
    try:
        pages.madvise(_WIPE_ON_FORK)
    except OSError:  # gVisor
        pages.madvise(mmap.MADV_DONTFORK)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
