"""Memory of a device that goes to pinned memory of the host, and back: storages lose their memory and get it again.

Tensors and storages stay the same objects, and so do views and tied weights; whether addresses do depends on how that
is done (`backing.py`). Nothing may be computed with them meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs

from colocate._definitions.device_copies import SideStream
from colocate._system.imported import imported
from colocate._system.room import free_memory
from colocate._system.sizes import size_text
from colocate.gpus import in_use
from colocate.worker.backing import Backing, Mapped, Resized
from colocate.worker.digests import digests
from colocate.worker.pinned import Arena, Room
from colocate.worker.storages import WeakStorage

Key: TypeAlias = int
"""What a storage is called as long as there is a reference to it: `storage._cdata`."""


@attrs.define(eq=False)
class _Copy:
    """A storage's contents on the host.

    Attributes:
        nbytes: How many they are.
        host: They; None where they were let go of.
        digest: A number that they make; None where it isn't known.
        storage: The storage, while it has no memory; None while it has, when nothing keeps it here.
        reference: What tells whether it is there.
        backing: How it loses its memory.
    """

    nbytes: int
    host: Room | None
    digest: int | None
    storage: Any
    reference: WeakStorage
    backing: Backing

    def is_of(self, storage: Any, digest: int) -> bool:
        """Whether a storage has these contents."""
        return self.host is not None and self.digest == digest and self.nbytes == storage.nbytes()


class Offload:
    """Storages of one device that are on the host, and copies of such as hardly change."""

    def __init__(self, device: str, free: Callable[[], int] = free_memory) -> None:
        """Args: device: As torch calls it. free: How much of the host's memory is free."""
        self._device = device
        self._arena = Arena(device, free)
        self._copies: dict[Key, _Copy] = {}
        self._side = SideStream(device)
        self._backings: tuple[Backing, ...] = (Mapped(device), Resized())

    @property
    def pinned(self) -> int:
        """Bytes of the host that are kept for copies, in use or not."""
        return self._arena.nbytes

    def write(
        self,
        storages: Mapping[Key, Any],
        emptied: Mapping[Key, Any] = MappingProxyType({}),
        once: Collection[Key] = (),
    ) -> Offloading:
        """Copy storages to the host; they keep their memory until `Offloading.put_away`.

        What is there already as it is now isn't copied again.

        Args:
            storages: Those.
            emptied: Others, whose contents nobody needs, also such as have no memory: they will come back as zeros.
            once: Those of the first whose copies aren't wanted any more when they are there again: so nobody will ask
                whether they have changed.

        Raises:
            MemoryError: The host has no room for them: nothing has changed.
        """
        for key in [key for key, known in self._copies.items() if known.reference.expired()]:
            del self._copies[key]
        copies: dict[Key, _Copy] = {}
        new: dict[Key, int | None] = {}
        with self._copying():
            kept = {key: storage for key, storage in storages.items() if key not in once}
            found = dict(zip(kept, digests([_view(storage) for storage in kept.values()]), strict=True))
            for key, storage in storages.items():
                digest = found.get(key)
                known = self._copies.pop(key, None)
                if known is not None and digest is not None and known.is_of(storage, digest):
                    copies[key] = attrs.evolve(known, storage=storage, backing=self._backing_of(storage))
                else:
                    new[key] = digest
            known = None
            self._reserve([storages[key].nbytes() for key in new], copies)
            for key, digest in new.items():
                copies[key] = self._copy(storages[key], self._to_host(_view(storages[key])), digest)
        for key, storage in emptied.items():
            if (known := self._copies.get(key)) is not None and self.away(key):
                copies[key] = attrs.evolve(known, host=None, digest=None)
            else:
                copies[key] = self._copy(storage, None, None)
        return Offloading(self, copies)

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

    def put_away(self, copies: Mapping[Key, _Copy], gives_back: bool) -> int:
        """Take the memory from storages whose contents are on the host. The bytes that the device keeps of it.

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
            MemoryError: The device hasn't that much: nothing has changed.
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
                    if copy.host is None:
                        view.zero_()
                    else:
                        for part, piece in _along(view, copy.host):
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
        self._arena.close()

    def _reserve(self, sizes: list[int], needed: Collection[Key]) -> None:
        """Have pinned memory for some copies. Where it is short, copies of what is awake go, which might serve again.

        Raises:
            MemoryError: The host hasn't that much.
        """
        try:
            self._arena.reserve(sizes)
        except MemoryError:
            spare = [key for key, copy in self._copies.items() if copy.storage is None and key not in needed]
            if not spare:
                raise
            self.let_go(spare)
            self._arena.reserve(sizes)

    def _copy(self, storage: Any, host: Room | None, digest: int | None) -> _Copy:
        return _Copy(storage.nbytes(), host, digest, storage, WeakStorage(storage), self._backing_of(storage))

    def _backing_of(self, storage: Any) -> Backing:
        return next(each for each in self._backings if each.has(storage))

    def _take(self, copies: Collection[_Copy]) -> int:
        return sum(
            backing.take([copy.storage for copy in copies if copy.backing is backing]) for backing in self._backings
        )

    def _to_host(self, view: Any) -> Room:
        host = self._arena.take(view.numel())
        for part, piece in _along(view, host):
            piece.copy_(part, non_blocking=True)
        return host

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """A block whose copies are done on a stream of their own, and are done at its end."""
        module = in_use(self._device)
        if module is None:
            yield
            return
        # Memory that was just taken may have been let go of by what is still computed.
        with self._side.after(module):
            yield

    def _give_back(self) -> None:
        """Have the device's other users get what torch keeps for itself."""
        if (module := in_use(self._device)) is not None:
            with contextlib.suppress(RuntimeError):  # another thread captures a graph: torch can't meanwhile
                module.empty_cache()


@attrs.frozen
class Offloading:
    """Storages whose contents are on the host, too."""

    _offload: Offload
    _copies: Mapping[Key, _Copy]

    def put_away(self, gives_back: bool = True) -> int:
        """Have them be there only.

        Args:
            gives_back: Whether others get the memory, for which the device waits until nothing is computed.

        Returns:
            The bytes that the device keeps all the same.
        """
        return self._offload.put_away(self._copies, gives_back)


def _along(view: Any, host: Room) -> Iterator[tuple[Any, Any]]:
    """The parts of a view of bytes, each with what it is copied to and from."""
    return zip(view.split([piece.numel() for piece in host.parts]), host.parts, strict=True)


def _view(storage: Any) -> Any:
    """A storage's bytes as a tensor."""
    torch = imported("torch")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
