"""How storages of a device lose their memory, and get it again: by their sizes, or from where they are.

Of both kinds the contents have to be somewhere else before, and are put there afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from colocate.gpus import in_use, number_of
from colocate.worker.vmm import Chunk, Segment, Vmm, VmmError, blocks


class Backing(Protocol):
    """One way to do it."""

    def has(self, storage: Any) -> bool:
        """Whether that is the way for a storage, which has its memory."""
        ...

    def take(self, storages: Collection[Any]) -> int:
        """Take the memory from storages. How much of it the device keeps all the same, in bytes."""
        ...

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """Give memory to storages, of such sizes, if they have none: to all, or to none.

        Raises:
            RuntimeError: The device hasn't that much: nothing has changed.
        """
        ...


class Resized:
    """Storages are resized to nothing; they have other addresses afterwards. Torch has what they had, for others."""

    def has(self, storage: Any) -> bool:
        """Whether it can be: what has come from another library can't."""
        return bool(storage.resizable())

    def take(self, storages: Collection[Any]) -> int:
        """See `Backing`."""
        for storage in storages:
            storage.resize_(0)
        return 0

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """See `Backing`."""
        there: list[Any] = []
        try:
            for storage, nbytes in storages:
                if storage.nbytes() != nbytes:
                    storage.resize_(nbytes)
                    there.append(storage)
        except RuntimeError:
            self.take(there)
            raise


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
        """See `Backing`. What the driver doesn't let go of stays; it tells an error to whoever uses the device next."""
        vmm = Vmm.in_use()
        if vmm is None or not storages:
            return 0
        self._asleep.update(storage.data_ptr() for storage in storages)
        with suppress(VmmError):
            vmm.take(number_of(self._device), list(self._unused(vmm)))
        return sum(vmm.present(storage.data_ptr(), storage.nbytes()) for storage in storages)

    def give(self, storages: Collection[tuple[Any, int]]) -> None:
        """See `Backing`."""
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
        """The chunks of segments with storages that sleep in which nothing is awake."""
        # Their order: a segment that torch has let go of in between, and another one made there, has another serial.
        segments = {segment.address: segment for segment in vmm.segments(number_of(self._device))}
        for found in in_use(self._device).memory_snapshot():
            if (segment := segments.get(found["address"])) is not None:
                yield from self._unused_of(segment, found)

    def _unused_of(self, segment: Segment, found: Mapping[str, Any]) -> Iterator[Chunk]:
        used: dict[int, int] = {}
        stay: set[int] = set()
        for begin, block in blocks(found):
            end = begin + block["size"]
            first, last = ((each - segment.address) // segment.chunk for each in (begin, end - 1))
            if begin in self._asleep:
                for index in range(first, last + 1):
                    start = segment.address + index * segment.chunk
                    share = min(end, start + segment.chunk) - max(begin, start)
                    used[index] = used.get(index, 0) + share
            elif block["state"] != "inactive":
                stay.update(range(first, last + 1))
        if used:  # else it is somebody else's, who may be about to make something there
            for index in range(-(-segment.size // segment.chunk)):
                if index not in stay:
                    yield Chunk(segment.address + index * segment.chunk, segment.serial, used.get(index, 0))
