"""What notes pieces of memory: storages of tensors, and arrays, each of them once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from colocate._system.imported import imported
from colocate._values.leaves import PLAIN
from colocate._values.leaving import memories, sparse_parts
from colocate.gpus import in_use


class Storages(dict[str, dict[int, int]]):
    """Pieces of memory that tensors and arrays may share: by device, as torch has it, the size of each by its address.

    There are no objects for them: a hundred thousand new ones would have the garbage collector look at all others.

    Attributes:
        has_arrays: Whether some are of arrays. Tensors may be made of parts of one: their storages lie in it.
    """

    has_arrays = False

    def include(self, more: Storages) -> None:
        """Note what others note, too."""
        self.has_arrays |= more.has_arrays
        for place, sizes in more.items():
            self._put(place, dict(sizes))

    def _put(self, place: str, sizes: dict[int, int]) -> None:
        """Note pieces, by what becomes part of this."""
        if not (known := self.get(place)):
            self[place] = sizes
            return
        if not known.keys().isdisjoint(sizes):  # a part of an array begins where all of it does
            sizes = {address: max(size, known.get(address, 0)) for address, size in sizes.items()}
        known.update(sizes)

    def add_all(self, values: Iterable[Any]) -> None:
        """Note those of the tensors and arrays in values, those of plain tensors together: nearly all are."""
        torch = imported("torch")
        plain, others = _parted([*values], torch)
        for value in others:
            self.add(value)
        if not plain:
            return
        if (sizes := _on_the_host(plain)) is not None:
            self.add_pieces(plain, sizes, name_of(plain[0].device))
            return
        strided = [each for each in plain if each.layout is torch.strided]
        if len(strided) < len(plain):
            for value in [each for each in plain if each.layout is not torch.strided]:
                self.add(value)
        for device, tensors in _by_device(strided).items():
            if device.type == "meta":
                for tensor in tensors:
                    self.add_tensor(tensor, torch)
            else:
                self.add_plain(tensors, name_of(device))

    def add(self, value: Any) -> None:
        """Note those of the tensors and arrays in a value."""
        torch = imported("torch")
        for item in memories(value):
            if torch is not None and isinstance(item, torch.Tensor):
                self.add_tensor(item, torch)
            else:
                self._add_array(item)

    def add_tensor(self, item: Any, torch: Any) -> None:
        """Note that of a tensor, or those of the tensors that it is made of: sparse ones, jagged ones, DTensors."""
        if _is_made_of_others(item, torch):
            self.add_parts(item, *_parts(item, torch), torch)
        elif _storage_of(item) is not None:
            self.add_plain([item], name_of(item.device))

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Note those of the tensors that a tensor is made of."""
        for part in [*values, *indices]:
            self.add_tensor(part, torch)

    def add_plain(self, items: list[Any], device: str) -> None:
        """Note those of tensors of a device, which have one each."""
        try:
            sizes = {(storage := item.untyped_storage()).data_ptr(): storage.nbytes() for item in items}
        except RuntimeError:  # of one that somebody has kept of what `torch.func` had transformed
            if len(items) > 1:
                for item in items:
                    self.add_plain([item], device)
            return
        if len(sizes) < len(items):  # they share some, or have it from an array of which each has a part
            for item in items:
                address, nbytes = (storage := item.untyped_storage()).data_ptr(), storage.nbytes()
                sizes[address] = max(nbytes, sizes.get(address, 0))
        self.add_pieces(items, sizes, device)

    def add_pieces(self, items: list[Any], sizes: dict[int, int], device: str) -> None:
        """Note pieces of a device's memory, and the tensors that have them."""
        if 0 in sizes.values():
            sizes = {address: nbytes for address, nbytes in sizes.items() if nbytes}
        if sizes:
            self._put(device, sizes)

    def _add_array(self, item: Any) -> None:
        numpy = imported("numpy")
        if numpy is None or not isinstance(item, numpy.ndarray):
            return
        item = _whole(item, numpy)
        torch = imported("torch")
        if torch is not None and isinstance(item.base, torch.Tensor):  # `tensor.numpy()`
            self.add_tensor(item.base, torch)
        elif item.nbytes:
            self.add_plain_array(item)

    def add_plain_array(self, item: Any) -> None:
        """Note that of an array which is no view of another one."""
        self.has_arrays = True
        self._put("cpu", dict([_reach(item)]))


class Objects(Storages):
    """Storages with the objects themselves: pieces are named by what torch has for these, which stays as memory goes.

    Arrays are named by their addresses.

    Attributes:
        storages: The storages, by that.
        trained: What those of tensors that have gradients are called.
        indices: Likewise, of tensors that say where the values of a sparse or a jagged one are.
        pinned: Those of the host that a device reads and writes by itself, at the pages that they have.
        arrays: The sizes of arrays that are no tensors', by their addresses.
        tensors: Those that lie there, by piece.
    """

    def __init__(self, device: str = "cpu") -> None:
        """Args: device: The slot's, as torch calls it."""
        super().__init__()
        self._pins = in_use(device) is not None
        self.storages: dict[int, Any] = {}
        self.trained: set[int] = set()
        self.indices: set[int] = set()
        self.pinned: set[int] = set()
        self.arrays: dict[int, int] = {}
        self.tensors: dict[int, list[weakref.ref[Any]]] = {}

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Note those of the tensors that a tensor is made of. It is that which has gradients, not they."""
        super().add_parts(item, values, indices, torch)
        self.indices.update(self._keys(indices, torch))
        if item.requires_grad:
            self.trained.update(self._keys(values, torch))

    def add_pieces(self, items: list[Any], sizes: dict[int, int], device: str) -> None:
        """Note pieces of a device's memory, and the tensors that have them."""
        pieces = self.setdefault(device, {})
        for item in items:
            storage = item.untyped_storage()
            key = storage._cdata
            pieces[key] = storage.nbytes()
            self.storages[key] = storage
            self.tensors.setdefault(key, []).append(weakref.ref(item))
            if self._pins and item.is_pinned():
                self.pinned.add(key)
            if item.requires_grad:
                self.trained.add(key)

    def _keys(self, parts: Iterable[Any], torch: Any) -> Iterable[int]:
        plain = (part for part in parts if not _is_made_of_others(part, torch))
        return [storage._cdata for part in plain if (storage := _storage_of(part)) is not None]

    def add_plain_array(self, item: Any) -> None:
        """Note that of an array which is no view of another one."""
        super().add_plain_array(item)
        address, size = _reach(item)
        self.arrays[address] = size


class WeakStorage:
    """Tells whether a storage is there, and finds it; keeps none."""

    __slots__ = ("_again", "_weak")

    def __init__(self, storage: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._again: Callable[[int], Any] = type(storage)._new_with_weak_ptr

    def expired(self) -> bool:
        """Whether it isn't there any more."""
        return bool(self._weak.expired())

    def storage(self) -> Any:
        """It; None where it isn't there any more."""
        return self._again(self._weak.cdata)


def _parted(values: list[Any], torch: Any) -> tuple[list[Any], list[Any]]:
    """The tensors of torch's own kinds, with one piece of memory each, and what else may have memory."""
    kinds = frozenset() if torch is None else frozenset((torch.Tensor, torch.nn.Parameter))
    plain, others = values, []
    if not kinds.issuperset(map(type, values)):
        plain = [each for each in values if type(each) in kinds]
        others = [each for each in values if type(each) not in kinds and type(each) not in PLAIN]
    return plain, others


def _on_the_host(tensors: list[Any]) -> dict[int, int] | None:
    """The pieces of tensors that each have one of the host to themselves; None where others are among them.

    Nearly always there are none. To look for them first would take as long again: a hundred thousand tensors aren't in
    the processor's caches, and each look fetches them there.
    """
    try:
        sizes = {(storage := each.untyped_storage()).data_ptr(): storage.nbytes() for each in tensors if each.is_cpu}
    except RuntimeError:  # one is sparse, say
        return None
    return sizes if len(sizes) == len(tensors) else None


def _by_device(tensors: list[Any]) -> dict[Any, list[Any]]:
    if len(devices := {each.device for each in tensors}) == 1:
        return {devices.pop(): tensors}
    found: dict[Any, list[Any]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def _storage_of(item: Any) -> Any:
    """A tensor's; None where there is no memory: it isn't made yet (lazy modules), or there for tracing (an export)."""
    try:
        storage = item.untyped_storage()
        if storage.device.type == "meta":
            return None
        storage.data_ptr()
    except (RuntimeError, ValueError):
        return None
    return storage


def _whole(item: Any, numpy: Any) -> Any:
    """The array of which another one is a view, or that itself."""
    while True:
        base = item.base
        if type(base).__module__.startswith("numpy.") and not isinstance(base, numpy.ndarray):
            base = getattr(base, "base", None)  # `as_strided` has an object between the two
        if not isinstance(base, numpy.ndarray):
            return item
        item = base


def _reach(item: Any) -> tuple[int, int]:
    """Where the memory of an array begins, and its size: strides may go backwards, and over the same memory again."""
    start = item.__array_interface__["data"][0]
    steps = [(count - 1) * stride for count, stride in zip(item.shape, item.strides, strict=True)]
    ahead = item.itemsize + sum(step for step in steps if step > 0)
    back = sum(step for step in steps if step < 0)
    return start + back, ahead - back


def _is_made_of_others(item: Any, torch: Any) -> bool:
    if item.layout is not torch.strided or hasattr(item, "__tensor_flatten__"):
        return True
    return type(item) not in (torch.Tensor, torch.nn.Parameter) and not item.is_meta and _storage_of(item) is None


def _parts(item: Any, torch: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that a tensor is made of: its values, and what says where these are."""
    if (parts := sparse_parts(item)) is not None:
        return parts[-1:], parts[:-1]
    # Without that method they are in attributes, such as those of a masked tensor.
    names = item.__tensor_flatten__()[0] if hasattr(item, "__tensor_flatten__") else list(vars(item))
    # A DTensor names its mesh there, too.
    tensors = {name: each for name in names if isinstance(each := getattr(item, name), torch.Tensor)}
    if item.layout is torch.jagged:
        return [tensors.pop("_values")], list(tensors.values())
    return list(tensors.values()), []


@functools.lru_cache(maxsize=64)
def name_of(device: Any) -> str:
    """Return what torch calls a device."""
    return str(device)
