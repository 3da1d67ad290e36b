"""Where a worker's memory is while it sleeps: a device's in pinned memory of the host, the host's in a file.

Storages lose their memory and get it again: tensors and storages stay the same objects, and so do views and tied
weights; addresses are others afterwards, but for `sleep="vmm"` (`vmm.py`). Nothing may be computed with them meanwhile.
Copies of what hardly changes are kept, and aren't made again.

Torch pins powers of two, one page after the other. Here several threads touch the pages first, which are huge ones
where the kernel has such: that takes a fifth of the time (docs/gpu.md).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import attrs

from colocate._devices.copies import SideStream
from colocate._devices.cuda_driver import DriverError, driver
from colocate._system.imported import imported
from colocate._system.jobs import by_threads
from colocate._system.libc import LARGE_PAGE_BYTES, advise_large, libc
from colocate._system.numbers import size_text
from colocate._system.room import SpillFile, free_memory
from colocate.gpus import in_use
from colocate.worker.memory.holdings import WeakStorage, name_of
from colocate.worker.memory.vmm import Mapped

GRAIN = 512  # bytes: where pieces may begin
_THREADS = 8
_TOUCHED_BYTES = 64 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14
HOST = "cpu"
_WORDS_AT_ONCE = 1 << 20  # what is looked at needs twice as much memory beside it
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_PRIME = 1_000_003

Key: TypeAlias = int
"""What a storage is called as long as there is a reference to it: `storage._cdata`."""


class Resized:
    """Storages are resized to nothing. Torch has what they had, for others."""

    def has(self, storage: Any) -> bool:
        """Whether a storage can be: not what has come from another library, nor what an array was made of."""
        # A device's is always said to be shared.
        return bool(storage.resizable()) and not (place_of(storage) == HOST and storage.is_shared())

    def take(self, storages: Collection[Any]) -> int:
        """Take the memory from storages, and return how much of it stays all the same: none."""
        for storage in storages:
            storage.resize_(0)
        return 0

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """Give memory to storages, of such sizes, if they have none: to all, or to none."""
        there: list[Any] = []
        try:
            for storage, nbytes in storages:
                if storage.nbytes() != nbytes:
                    if not storage.resizable():
                        raise RuntimeError(
                            "an array was made of a tensor while that slept (`tensor.numpy()`), so torch can't give it "
                            "its memory again; restart the group from its checkpoint"
                        )
                    storage.resize_(nbytes)
                    there.append(storage)
                    if place_of(storage) == HOST:  # with small ones most of a wake's time is the kernel's
                        start = storage.data_ptr()
                        advise_large(start, start + storage.nbytes(), mmap.MADV_HUGEPAGE)
        except RuntimeError:
            self.take(there)
            raise


@attrs.define(eq=False)
class _Copy:
    """A storage's contents elsewhere.

    Attributes:
        nbytes: How many they are.
        room: Where they are; None where they were let go of.
        digest: A number that they make; None where it isn't known.
        storage: The storage, while it has no memory; None while it has, when nothing keeps it here.
        reference: What tells whether it is there.
        backing: How it loses its memory.
    """

    nbytes: int
    room: Room | None
    digest: int | None
    storage: Any
    reference: WeakStorage
    backing: Resized | Mapped


class Offload:
    """Storages of a worker that are elsewhere, and copies of such as hardly change."""

    def __init__(
        self, device: str, free: Callable[[], int] = free_memory, spill_dir: Callable[[], str | None] = lambda: None
    ) -> None:
        """Nothing is."""
        self._device = device
        self._free = free
        self._spill_dir = spill_dir
        self._file: SpillFile | None = None
        self._pinned = Arena(self._pin)
        self._spilled = Arena(self._spill)
        self._mapped: list[mmap.mmap] = []
        self._copies: dict[Key, _Copy] = {}
        self._side = SideStream(device)
        self._backings: tuple[Resized | Mapped, ...] = (Mapped(device), Resized())

    @property
    def pinned(self) -> int:
        """Bytes of the process's own memory that are kept for copies, in use or not."""
        return self._pinned.nbytes

    def file(self) -> SpillFile:
        """The file to which the host's memory goes, made when it is first needed."""
        if self._file is None:
            self._file = SpillFile.somewhere(self._spill_dir())
        return self._file

    def write(
        self,
        storages: Mapping[Key, Any],
        emptied: Mapping[Key, Any] = MappingProxyType({}),
        once: Collection[Key] = (),
    ) -> Mapping[Key, _Copy]:
        """Copy storages to where they go, and return the copies; they keep their memory until `put_away`.

        What is there already as it is now isn't copied again. Nothing has to be done to leave it at that.

        Args:
            storages: Those.
            emptied: Others, whose contents nobody needs, also such as have no memory: they will come back as zeros.
            once: Those of the first whose copies aren't wanted any more when they are there again: so nobody will ask
                whether they have changed.

        Raises:
            MemoryError: The host has no room for them: nothing has changed.
            OSError: Nor the disk.
            ValueError: There is no place for what goes to a file.
        """
        for key in [key for key, known in self._copies.items() if known.reference.expired()]:
            del self._copies[key]
        copies: dict[Key, _Copy] = {}
        new: dict[Key, int | None] = {}
        with self._copying():
            of_device = {key: each for key, each in storages.items() if key not in once and place_of(each) != HOST}
            found = dict(zip(of_device, digests([_view(each) for each in of_device.values()]), strict=True))
            for key, storage in storages.items():
                known = None if key in once else self._copies.get(key)
                if known is not None and _is_same(known, storage, found.get(key)):
                    copies[key] = self._copy(storage, known.room, known.digest)
                else:
                    new[key] = found.get(key)
                self._copies.pop(key, None)
            known = None
            self._reserve([storages[key] for key in new], copies)
            for key, digest in new.items():
                copies[key] = self._copy(storages[key], self._put(storages[key]), digest)
        for key, storage in emptied.items():
            if (known := self._copies.get(key)) is not None and self.away(key):
                copies[key] = attrs.evolve(known, room=None, digest=None)
            else:
                copies[key] = self._copy(storage, None, None)
        return copies

    def away(self, key: Key) -> bool:
        """Whether a storage has no memory."""
        found = self._copies.get(key)
        return found is not None and found.storage is not None

    def can_take(self, storage: Any) -> bool:
        """Whether a storage, which has its memory, can lose it."""
        return any(each.has(storage) for each in self._backings)

    def keeps_address(self, storage: Any) -> bool:
        """Whether a storage, which has its memory, is in the same place after it was away."""
        return any(isinstance(each, Mapped) and each.has(storage) for each in self._backings)

    def put_away(self, copies: Mapping[Key, _Copy], gives_back: bool = True) -> int:
        """Take the memory from storages whose contents are elsewhere; return the bytes that the device keeps of it.

        With `gives_back` others get that memory, for which the device waits until nothing is computed.

        Raises:
            RuntimeError: It can't be taken from one of them: all have theirs again.
        """
        new = {key: copy for key, copy in copies.items() if not self.away(key)}
        self._copies.update(copies)  # first: from here on they are the only ones
        try:
            left = self._take(new.values())
        except RuntimeError:
            self.bring_back(new)
            self.let_go(new)
            raise
        if gives_back:
            self._give_back()
        return left

    def bring_back(self, keys: Collection[Key]) -> None:
        """Give storages their memory and contents; the copies stay.

        Raises:
            MemoryError: There isn't that much: nothing has changed.
        """
        given: list[_Copy] = []
        try:
            for backing in self._backings:
                some = [copy for copy in (self._copies[key] for key in keys) if copy.backing is backing]
                backing.give([(copy.storage, copy.nbytes) for copy in some])
                given += some
            with self._copying():
                for copy in given:
                    view = _view(copy.storage)
                    if copy.room is None:
                        view.zero_()
                    else:
                        for part, piece in _along(view, copy.room):
                            part.copy_(piece, non_blocking=True)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self._take(given)
            self._give_back()
            size = sum(self._copies[key].nbytes for key in keys)
            what = str(error).partition("\n")[0]
            raise MemoryError(f"{size_text(size)} are needed on {self._device}: {what}") from error
        for copy in given:
            copy.storage = None

    def let_go(self, keys: Collection[Key]) -> None:
        """Forget the copies of storages that are there."""
        for key in keys:
            del self._copies[key]

    def undo(self, keys: Iterable[Key]) -> None:
        """Put storages away again that have just been brought back, with all their copies kept."""
        copies = [self._copies[key] for key in keys]
        for copy in copies:
            copy.storage = copy.reference.storage()
        self._take(copies)
        self._give_back()

    def close(self) -> None:
        """Nothing sleeps any more, nor will."""
        self._copies.clear()
        for arena in (self._pinned, self._spilled):
            arena.close()
        self._mapped.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reserve(self, storages: list[Any], needed: Collection[Key]) -> None:
        """Have room for some copies. Where it is short, copies of what is awake go, which might serve again."""
        by_arena: dict[Arena, list[int]] = {}
        for storage in storages:
            by_arena.setdefault(self._arena(storage), []).append(storage.nbytes())
        for arena, sizes in by_arena.items():
            try:
                arena.reserve(sizes)
            except (MemoryError, OSError):
                spare = [key for key, copy in self._copies.items() if copy.storage is None and key not in needed]
                if not spare:
                    raise
                self.let_go(spare)
                arena.reserve(sizes)

    def _arena(self, storage: Any) -> Arena:
        return self._spilled if place_of(storage) == HOST else self._pinned

    def _pin(self, nbytes: int) -> list[Any]:
        what = f"{size_text(nbytes)} of the host's memory are needed, to be pinned"
        if self._pinned.size:
            what += f", beside the {size_text(self._pinned.size)} that are"
        if nbytes > (free := self._free()):
            raise MemoryError(f"{what}: {size_text(free)} are free")
        try:
            return pinned(nbytes, self._device)
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"{what}: {str(error).partition(chr(10))[0]}") from error

    def _spill(self, nbytes: int) -> list[Any]:
        torch, file = imported("torch"), self.file()
        ahead = self._spilled.size // 4  # each piece takes a descriptor, and there aren't many
        try:
            self._mapped.append(file.more(max(nbytes, -(-ahead // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)))
        except OSError:
            if ahead <= nbytes:
                raise
            self._mapped.append(file.more(nbytes))
        return [torch.frombuffer(self._mapped[-1], dtype=torch.uint8)]

    def _copy(self, storage: Any, room: Room | None, digest: int | None) -> _Copy:
        backing = next(each for each in self._backings if each.has(storage))
        return _Copy(storage.nbytes(), room, digest, storage, WeakStorage(storage), backing)

    def _take(self, copies: Collection[_Copy]) -> int:
        return sum(
            backing.take([copy.storage for copy in copies if copy.backing is backing]) for backing in self._backings
        )

    def _put(self, storage: Any) -> Room:
        room = self._arena(storage).take(storage.nbytes())
        for part, piece in _along(_view(storage), room):
            piece.copy_(part, non_blocking=True)
        return room

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """A block whose copies are done on a stream of their own, and are done at its end."""
        module = in_use(self._device)
        try:
            # Memory that was just taken may have been let go of by what is still computed.
            with contextlib.nullcontext() if module is None else self._side.after(module):
                yield
        finally:
            for each in self._mapped:  # the file's pages are the system's from here on, and no longer the process's
                each.madvise(mmap.MADV_DONTNEED)

    def _give_back(self) -> None:
        """Have the device's other users get what torch keeps for itself."""
        if (module := in_use(self._device)) is not None:
            with contextlib.suppress(RuntimeError):  # another thread captures a graph: torch can't meanwhile
                module.empty_cache()


def _along(view: Any, room: Room) -> Iterator[tuple[Any, Any]]:
    """The parts of a view of bytes, each with what it is copied to and from."""
    return zip(view.split([piece.numel() for piece in room.parts]), room.parts, strict=True)


def _view(storage: Any) -> Any:
    """A storage's bytes as a tensor."""
    torch = imported("torch")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def place_of(storage: Any) -> str:
    """Return the device on which a storage is, as torch calls it."""
    return name_of(storage.device)


def _is_same(known: _Copy, storage: Any, digest: int | None) -> bool:
    """Whether a storage has the contents of its copy: a device's is told by what they make, the host's is compared."""
    if known.room is None or known.nbytes != storage.nbytes():
        return False
    if place_of(storage) != HOST:
        return digest is not None and known.digest == digest
    pairs = ((part.data_ptr(), piece.data_ptr(), piece.numel()) for part, piece in _along(_view(storage), known.room))
    compare = libc().memcmp
    return all(not compare(ctypes.c_void_p(one), ctypes.c_void_p(two), ctypes.c_size_t(n)) for one, two, n in pairs)


class _Span(NamedTuple):
    """Bytes of a region that are nobody's."""

    region: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@attrs.frozen(eq=False)
class Room:
    """Some of the memory: it is taken for as long as there is a reference to this.

    Attributes:
        parts: Its bytes, as tensors, one after the other.
    """

    parts: tuple[Any, ...]


class Arena:
    """Memory for copies: it grows to what sleeps at once, and is kept."""

    def __init__(self, grow: Callable[[int], list[Any]]) -> None:
        """Args: grow: Gives new regions of so many bytes together, as tensors of bytes; raises where there are none."""
        self._grow = grow
        self._regions: list[Any] = []
        self._placed: list[_Span] = []  # what is nobody's, by where it is: none begins where another one ends
        self._sized: list[tuple[int, _Span]] = []
        self._left: deque[_Span] = deque()  # by rooms that are gone; on whatever thread, amid whatever else

    @property
    def size(self) -> int:
        """How much of it there is, taken or not."""
        return sum(region.numel() for region in list(self._regions))

    @property
    def nbytes(self) -> int:
        """How much of that is the process's own: what torch pins is shared with the driver."""
        return sum(region.numel() for region in list(self._regions) if not region.untyped_storage().resizable())

    def reserve(self, sizes: list[int]) -> int:
        """Have room for pieces of such sizes, which are then taken one by one; return what is nobody's.

        Raises what `grow` raises.
        """
        while self._left:
            self._give(self._left.popleft())
        spare = sum(size for size, _ in self._sized)
        if (more := sum(map(_rounded, sizes)) - spare) > 0:
            for region in self._grow(-(-more // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES):
                self._regions.append(region)
                self._give(_Span(len(self._regions) - 1, 0, region.numel()))
                spare += region.numel()
        return spare

    def take(self, nbytes: int) -> Room:
        """Return some of what was reserved."""
        taken, needed = [], _rounded(nbytes)
        while needed:
            # The smallest that has room for so much; else the largest, which has for some of it.
            at = bisect.bisect_left(self._sized, (needed,))
            span = self._sized[min(at, len(self._sized) - 1)][1]
            self._remove(span)
            used = span._replace(stop=min(span.stop, span.start + needed))
            if used.stop < span.stop:
                self._give(span._replace(start=used.stop))
            taken.append(used)
            needed -= used.size
        parts = [self._regions[each.region][each.start : each.stop] for each in taken]
        if parts:
            parts[-1] = parts[-1][: nbytes - sum(part.numel() for part in parts[:-1])]
        room = Room(tuple(parts))
        weakref.finalize(room, self._left.extend, taken).atexit = False
        return room

    def close(self) -> None:
        """It is given back, as soon as no room of it is left."""
        self._regions, self._placed, self._sized, self._left = [], [], [], deque()

    def _give(self, span: _Span) -> None:
        """A span is nobody's, and so one with those beside it that are nobody's."""
        at = bisect.bisect_left(self._placed, span)
        for other in self._placed[max(0, at - 1) : at + 1]:
            if other.region == span.region and other.stop == span.start:
                self._remove(other)
                span = span._replace(start=other.start)
            elif other.region == span.region and other.start == span.stop:
                self._remove(other)
                span = span._replace(stop=other.stop)
        bisect.insort(self._placed, span)
        bisect.insort(self._sized, (span.size, span))

    def _remove(self, span: _Span) -> None:
        del self._placed[bisect.bisect_left(self._placed, span)]
        del self._sized[bisect.bisect_left(self._sized, (span.size, span))]


class _Pages(mmap.mmap):
    """Pages of the process's own, which are pinned for as long as they are there."""

    pinned_by: Any = None
    address: int

    def __del__(self) -> None:
        # Weak references to a mapping are told only when it has gone.
        if self.pinned_by is not None:
            with contextlib.suppress(DriverError):  # of a context that is lost
                self.pinned_by.unpin(self.address)


def pinned(nbytes: int, device: str) -> list[Any]:
    """Return new memory of the host's, as tensors of bytes, from and to which a device copies by itself."""
    if in_use(device) is None:
        return [_memory(nbytes)[1]]
    if (found := driver(device)) is not None:
        pages, memory = _memory(nbytes)
        # Torch itself has several threads for what is larger than a part.
        by_threads(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(_TOUCHED_BYTES), _THREADS)
        with contextlib.suppress(DriverError):  # it can't, as in some virtual machines: nothing is left of it then
            found.pin(memory.data_ptr(), nbytes)
            pages.pinned_by, pages.address = found, memory.data_ptr()
            return [memory]
        del pages, memory
    torch, regions = imported("torch"), []
    while nbytes:  # torch pins powers of two: of 33 GiB in one piece 64
        regions.append(torch.empty(1 << (nbytes.bit_length() - 1), dtype=torch.uint8, pin_memory=True))
        nbytes -= regions[-1].numel()
    return regions


def _memory(nbytes: int) -> tuple[_Pages, Any]:
    torch = imported("torch")
    pages = _Pages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A process that is forked has zeros there: else the device might copy from pages that are the other one's. It has
    # the addresses, too, as it may collect what lies there.
    try:
        pages.madvise(_WIPE_ON_FORK)
    except OSError:  # gVisor
        pages.madvise(mmap.MADV_DONTFORK)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN


def digests(views: Sequence[Any]) -> list[int | None]:
    """Return numbers of 64 bits that depend on each byte, its place, and how many there are.

    They tell whether memory of a device has changed, and are worked out where it is.

    Each word is mixed with its place before all are added (two rounds of SplitMix64, Steele et al. 2014): a sum of
    products would be the same for many permutations, and wherever an even number of signs have changed.

    Args:
        views: Bytes, as tensors of one device.

    Returns:
        One for each; None for those for which the device hasn't even the room: what sleeps then is what others want.
    """
    if not views:
        return []
    torch = imported("torch")
    totals: list[Any] = []
    try:
        most = min(_WORDS_AT_ONCE, max(view.numel() // 8 for view in views))
        places = torch.arange(1, most + 1, dtype=torch.int64, device=views[0].device).mul_(_WEYL)
        for view in views:
            totals.append(_digest(view, places))
        numbers: list[int | None] = torch.stack(totals).tolist()  # for which the device is waited for, once
    except torch.OutOfMemoryError:
        numbers = [int(total) for total in totals]
    return [*numbers, *[None] * (len(views) - len(numbers))]


def _digest(view: Any, places: Any) -> Any:
    torch = imported("torch")
    whole = view.numel() // 8 * 8
    total = torch.full((), view.numel(), dtype=torch.int64, device=view.device)
    for part in view[:whole].view(torch.int64).split(_WORDS_AT_ONCE):
        mixed = part + places[: part.numel()]
        for shift, factor in _ROUNDS:
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total = total * _PRIME + mixed.sum()
    for byte in view[whole:].tolist():
        total = total * _PRIME + byte
    return total
