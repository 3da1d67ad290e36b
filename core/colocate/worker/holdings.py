"""Finds a role's memory: tensors and arrays in modules, optimizers, attributes and containers of the role's object.

The search calls no user code, because objects are read through their dicts and slots. A role names memory elsewhere
(closures, attributes of classes or tensors, C++) in `device_state()`. Models that share weights, views, and an
optimizer with its model refer to the same memory, so each storage is counted only once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal, TypeAlias

import attrs

from colocate._protocol.ledger import Purpose
from colocate._role.context import Context
from colocate._system.by_type import by_type
from colocate._system.imported import find_imported
from colocate._values.kinds import is_collection
from colocate._values.leaving import has_memory, list_memories, list_slots, sparse_parts
from colocate._values.plain import PLAIN
from colocate.gpus import in_use

# A role may hold a data set of millions of small objects. The search stops after this number of objects.
_LOOKS = 200_000


# -- pieces of memory


class Storages(dict[str, dict[int, int]]):
    """Sizes of pieces of memory, by device and address. Tensors and arrays may share a piece.

    There is no object per piece, because a hundred thousand new objects would slow down garbage collections.

    Attributes:
        has_arrays: Whether some pieces belong to arrays. Tensors may be made of parts of an array, so that their
            storages overlap.
    """

    has_arrays = False

    def add_storages(self, more: Storages) -> None:
        """Add the pieces of other storages."""
        self.has_arrays |= more.has_arrays
        for place, sizes in more.items():
            self._add_sizes(place, dict(sizes))

    def add_all(self, values: Iterable[Any]) -> None:
        """Add the memory of tensors and arrays. Plain tensors, the vast majority, are handled together."""
        torch, values = find_imported("torch"), [*values]
        kinds = frozenset(() if torch is None else (torch.Tensor, torch.nn.Parameter))
        plain = values
        if not kinds.issuperset(map(type, values)):
            plain = [leaf for leaf in values if type(leaf) in kinds]
            for value in values:
                if type(value) not in kinds and type(value) not in PLAIN:
                    self.add_value(value)
        # Nearly always, all tensors are on the host, each with separate memory, so this case is tried first.
        # A check beforehand would double the time, because a hundred thousand tensors aren't in the processor's caches.
        with contextlib.suppress(RuntimeError):  # For example, a sparse tensor has no storage.
            sizes = {(memory := leaf.untyped_storage()).data_ptr(): memory.nbytes() for leaf in plain if leaf.is_cpu}
            if sizes and len(sizes) == len(plain):
                self.add_pieces(plain, sizes, get_device_name(plain[0].device))
                return
        devices = {leaf.device for leaf in plain}
        for device in devices:
            tensors = plain if len(devices) == 1 else [leaf for leaf in plain if leaf.device == device]
            try:
                sizes = {(storage := leaf.untyped_storage()).data_ptr(): storage.nbytes() for leaf in tensors}
            except RuntimeError:  # For example, a sparse tensor has no storage.
                sizes = {}
            if len(sizes) == len(tensors) and device.type != "meta":
                self.add_pieces(tensors, sizes, get_device_name(device))
            else:  # Some tensors share memory, or are parts of one array.
                for tensor in tensors:
                    self.add_tensor(tensor, torch)

    def add_value(self, value: Any) -> None:
        """Add the memory of tensors and arrays in a value."""
        torch, numpy = find_imported("torch"), find_imported("numpy")
        for item in list_memories(value):
            if numpy is not None and isinstance(item, numpy.ndarray):
                item = _get_base_array(item, numpy)
                if torch is None or not isinstance(item.base, torch.Tensor):
                    if item.nbytes:
                        self.add_array(*_get_extent(item))
                    continue
                item = item.base  # The array was made from this tensor by `tensor.numpy()`.
            if torch is not None and isinstance(item, torch.Tensor):
                self.add_tensor(item, torch)

    def add_tensor(self, item: Any, torch: Any) -> None:
        """Add the memory of a tensor, or of the components of a sparse tensor, jagged tensor or DTensor."""
        if _has_inner_tensors(item, torch):
            self.add_parts(item, *_split_parts(item, torch), torch)
        elif (storage := _get_storage(item)) is not None:
            self.add_pieces([item], {storage.data_ptr(): storage.nbytes()}, get_device_name(item.device))

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Add the memory of a tensor's components."""
        for part in [*values, *indices]:
            self.add_tensor(part, torch)

    def add_pieces(self, items: list[Any], sizes: dict[int, int], device: str) -> None:
        """Add pieces of a device's memory.

        `items` are the tensors, and `sizes` the sizes of their storages by address.
        """
        if 0 in sizes.values():
            sizes = {address: nbytes for address, nbytes in sizes.items() if nbytes}
        if sizes:
            self._add_sizes(device, sizes)

    def add_array(self, address: int, size: int) -> None:
        """Add the memory of an array that isn't a view of another array."""
        self.has_arrays = True
        self._add_sizes("cpu", {address: size})

    def _add_sizes(self, place: str, sizes: dict[int, int]) -> None:
        stored = self.setdefault(place, {})
        if not stored.keys().isdisjoint(sizes):  # A part of an array may begin at the address of the whole array.
            sizes = {address: max(size, stored.get(address, 0)) for address, size in sizes.items()}
        stored.update(sizes)


class Objects(Storages):
    """Storages that also record the tensors.

    A piece is named by its torch storage, which stays valid when memory moves.

    Attributes:
        storages: The torch storages, by name.
        trained: The names of storages of tensors with gradients.
        indices: The names of storages of index tensors of sparse or jagged tensors.
        pinned: The names of pinned host storages, which a device accesses directly, at fixed pages.
        arrays: The sizes of arrays without a tensor, by address.
        tensors: The tensors on each storage, by name.
    """

    def __init__(self, device: str = "cpu") -> None:
        """Args: device: The slot's device, in torch's notation."""
        super().__init__()
        self._pins = in_use(device) is not None
        self.storages: dict[int, Any] = {}
        self.trained: set[int] = set()
        self.indices: set[int] = set()
        self.pinned: set[int] = set()
        self.arrays: dict[int, int] = {}
        self.tensors: dict[int, list[weakref.ref[Any]]] = {}

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Add the memory of a tensor's components. Only the tensor itself has gradients."""
        super().add_parts(item, values, indices, torch)
        for parts, names in ((indices, self.indices), (values if item.requires_grad else [], self.trained)):
            plain = (_get_storage(part) for part in parts if not _has_inner_tensors(part, torch))
            names.update(storage._cdata for storage in plain if storage is not None)

    def add_pieces(self, items: list[Any], sizes: dict[int, int], device: str) -> None:
        """Add pieces of a device's memory, and record their tensors."""
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

    def add_array(self, address: int, size: int) -> None:
        """Add the memory of an array that isn't a view of another array."""
        super().add_array(address, size)
        self.arrays[address] = size


class WeakStorage:
    """Weak reference to a torch storage, which can return the storage while the storage exists."""

    __slots__ = ("_again", "_weak")

    def __init__(self, storage: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._again: Callable[[int], Any] = type(storage)._new_with_weak_ptr

    def is_expired(self) -> bool:
        """Return whether the storage was freed."""
        return bool(self._weak.expired())

    def get_storage(self) -> Any:
        """Return the storage, or None if the storage was freed."""
        return self._again(self._weak.cdata)


def _get_storage(item: Any) -> Any:
    """Return a tensor's storage, or None if the tensor has no memory, as in an uninitialized lazy module."""
    try:
        storage = item.untyped_storage()
        if storage.device.type == "meta":
            return None
        storage.data_ptr()
    except (RuntimeError, ValueError):
        return None
    return storage


def _has_inner_tensors(item: Any, torch: Any) -> bool:
    if item.layout is not torch.strided or hasattr(item, "__tensor_flatten__"):
        return True
    return type(item) not in (torch.Tensor, torch.nn.Parameter) and not item.is_meta and _get_storage(item) is None


def _split_parts(item: Any, torch: Any) -> tuple[list[Any], list[Any]]:
    """Return a tensor's components: tensors of values, and tensors of indices that locate the values."""
    if (parts := sparse_parts(item)) is not None:
        return parts[-1:], parts[:-1]
    # Without `__tensor_flatten__`, the components are attributes, as in a masked tensor.
    names = item.__tensor_flatten__()[0] if hasattr(item, "__tensor_flatten__") else list(vars(item))
    # A DTensor's names include the mesh, which isn't a tensor.
    tensors = {name: tensor for name in names if isinstance(tensor := getattr(item, name), torch.Tensor)}
    if item.layout is torch.jagged:
        return [tensors.pop("_values")], list(tensors.values())
    return list(tensors.values()), []


def _get_base_array(item: Any, numpy: Any) -> Any:
    """Return the base array of a view, or the array itself."""
    while True:
        base = item.base
        if type(base).__module__.startswith("numpy.") and not isinstance(base, numpy.ndarray):
            base = getattr(base, "base", None)  # `as_strided` puts another object between a view and the base array.
        if not isinstance(base, numpy.ndarray):
            return item
        item = base


def _get_extent(item: Any) -> tuple[int, int]:
    """Return the first address and the size of an array's memory. Strides may be negative or zero."""
    steps = [(count - 1) * stride for count, stride in zip(item.shape, item.strides, strict=True)]
    before = sum(step for step in steps if step < 0)
    behind = item.itemsize + sum(step for step in steps if step > 0)
    return item.__array_interface__["data"][0] + before, behind - before


@functools.lru_cache(maxsize=64)
def get_device_name(device: Any) -> str:
    """Return torch's name of a device."""
    return str(device)


# -- memory of one owner

Holdings: TypeAlias = dict[Purpose, Storages]
"""Storages of one owner, by purpose."""


@attrs.define(eq=False)
class SearchResult:
    """The tensors, arrays and optimizers that a search has found.

    Attributes:
        values_by_purpose: Tensors and arrays, by purpose.
        parameters: Trained parameters, by id.
        tensors: Other tensors that may have gradients.
        optimizers: Torch optimizers.
        has_met_excluded: Whether the search has met an excluded object.
        is_complete: Whether the search has finished.
    """

    values_by_purpose: dict[Purpose, list[Any]] = attrs.field(factory=lambda: {purpose: [] for purpose in Purpose})
    parameters: dict[int, Any] = attrs.field(factory=dict)
    tensors: list[Any] = attrs.field(factory=list)
    optimizers: list[Any] = attrs.field(factory=list)
    has_met_excluded: bool = False
    is_complete: bool = True

    @property
    def leaf_tensors(self) -> list[Any]:
        """Tensors that may have gradients."""
        return [*self.parameters.values(), *self.tensors]

    def to_holdings(self, storages: Callable[[], Storages] = Storages) -> Holdings:
        """Return the memory of the found tensors and arrays, by purpose."""
        memory = {purpose: storages() for purpose in Purpose}
        memory[Purpose.PARAMETERS].add_all(self.parameters.values())
        for purpose, values in self.values_by_purpose.items():
            memory[purpose].add_all(values)
        return memory


def find_holdings(
    instance: object,
    declared: Iterable[Any] = (),
    apart: Iterable[object] = (),
    storages: Callable[[], Storages] = Storages,
) -> tuple[Holdings, bool]:
    """Return the memory that an object holds, and whether the search was complete. Must run on the lane."""
    result = search(instance, apart=apart)
    result.values_by_purpose[Purpose.DECLARED] += declared
    result.values_by_purpose[Purpose.GRADIENTS] += list_gradients(result.leaf_tensors)
    return result.to_holdings(storages), result.is_complete


def list_gradients(leaves: Iterable[Any]) -> list[Any]:
    """Return the gradients of tensors. Must run on the lane."""
    return [gradient for tensor in leaves if tensor.is_leaf and (gradient := tensor.grad) is not None]


def find_optimizers(instance: object, apart: Iterable[object] = ()) -> list[Any]:
    """Return the torch optimizers that an object holds. The search skips the objects in `apart`."""
    return search(instance, apart=apart).optimizers


def find_resident_holdings(
    values: Iterable[object], apart: Iterable[object], storages: Callable[[], Storages] = Storages
) -> tuple[Holdings, list[Any]]:
    """Return the memory of residents, and the residents' tensors that may have gradients.

    If there are too many objects to search, only memory in lists, dicts and dataclasses is added.
    """
    result, roots = search(*(roots := list(values)), apart=apart), roots
    if not result.is_complete:
        result.values_by_purpose[Purpose.TENSORS] += list_memories(roots)
    return result.to_holdings(storages), result.leaf_tensors


def search(*roots: object, apart: Iterable[object] = ()) -> SearchResult:
    """Search objects breadth first, so that objects near the roots are found even if there are too many objects.

    Objects at one distance are handled together, by type, and all memory is handled at the end, because most time goes
    into steps per object.

    Args:
        roots: The objects to begin with.
        apart: Objects to exclude.
    """
    torch, result = find_imported("torch"), SearchResult()
    apart = [*apart]
    closed = frozenset(map(id, apart))
    budget = _LOOKS
    visited: dict[_Aim, set[int]] = {}
    near: dict[_Aim, list[Any]] = {None: [*roots]}

    def add(aim: _Aim, items: Iterable[Any]) -> None:
        copied = list(items)  # The items are copied in one step, because other threads may change the container.
        if not PLAIN.issuperset(map(type, copied)):
            near.setdefault(aim, []).extend(_filter_searchable(copied))

    while near:
        level, near = near, {}
        for aim, items in level.items():
            purpose = Purpose.OPTIMIZER if aim == "state" else aim
            visited_ids = visited.setdefault(aim, set(closed))
            by_id = {id(value): value for value in items}
            again = by_id.keys() & visited_ids
            result.has_met_excluded |= not closed.isdisjoint(again)
            for key in again:
                del by_id[key]
            visited_ids.update(by_id)
            for kind, batch in _group_by_kind(by_id.values()).items():
                if budget <= 0:
                    result.is_complete = False
                    return result
                budget, batch = budget - len(batch), batch[:budget]
                look, of_kind = _choose_look(kind)
                if look == "tensor":
                    if purpose is not Purpose.OPTIMIZER and kind is not torch.Tensor:
                        trained = [value for value in batch if isinstance(value, torch.nn.Parameter)]
                        result.parameters.update(zip(map(id, trained), trained, strict=True))
                        batch = [value for value in batch if id(value) not in result.parameters]
                    if purpose is not Purpose.OPTIMIZER:
                        result.tensors += batch
                    result.values_by_purpose[purpose or Purpose.TENSORS] += batch
                elif look == "array":
                    result.values_by_purpose[purpose or Purpose.TENSORS] += batch
                elif look == "dict":
                    for item in batch:
                        add(aim, dict.values(item))  # A subclass may override `values` with a method that loads data.
                elif look == "container":
                    for item in batch:
                        add(aim, item)
                elif look == "proxy":
                    # This finds the mappings behind the proxies without calling a proxy's methods, which may run code.
                    add(aim, gc.get_referents(*batch))
                elif look == "object":
                    if (name := _ACCUMULATED.get(kind.__name__)) and of_kind is Purpose.BUFFERS:
                        sums = [value for item in batch if (value := getattr(item, name, None)) is not None]
                        result.values_by_purpose[Purpose.GRADIENTS] += sums
                        visited.setdefault(of_kind, set(closed)).update(map(id, sums))
                    for item in batch:
                        add(of_kind or ("state" if aim == "state" else None), _list_attributes(item))
                elif purpose is not None:  # Contents of modules and optimizers don't inherit this purpose.
                    add(None, batch)
                elif look == "module":
                    namespaces = [*map(vars, batch)]
                    trained = _list_values(namespace.get("_parameters") for namespace in namespaces)
                    result.parameters.update(zip(map(id, trained), trained, strict=True))
                    result.values_by_purpose[Purpose.BUFFERS] += _list_values(
                        namespace.get("_buffers") for namespace in namespaces
                    )
                    add(None, _list_values(namespace.get("_modules") for namespace in namespaces))
                    # Modules of one type add few attributes to those of all modules, so up to 100 are handled together.
                    for part in [namespaces[start : start + 100] for start in range(0, len(namespaces), 100)]:
                        names = set[str]().union(*part) - _list_usual_names(torch)
                        add(of_kind, [namespace.get(name) for namespace in part for name in names])
                else:
                    for item in batch:
                        rest = dict(vars(item))
                        # Wrappers of optimizers may lack these attributes, or define properties instead.
                        groups, state = rest.pop("param_groups", None), rest.pop("state", None)
                        add(None, rest.values())
                        if groups is None:
                            continue
                        result.optimizers.append(item)
                        for group in list(groups):
                            trained = list(group["params"])
                            result.parameters.update(zip(map(id, trained), trained, strict=True))
                            add("state", [value for name, value in list(group.items()) if name != "params"])
                        state_values = _list_values([state])
                        add("state", _list_values(value for value in state_values if type(value) is dict))
                        add("state", [value for value in state_values if type(value) is not dict])
    # Megatron stores gradients of another dtype in an attribute of each parameter.
    # The garbage collector finds this attribute; reading `__dict__` would create a dict for nearly every parameter.
    attached = [value for value in gc.get_referents(*result.parameters.values()) if type(value) is dict]
    result.values_by_purpose[Purpose.GRADIENTS] += [
        value for namespace in attached if (value := namespace.get("main_grad")) is not None
    ]
    result.is_complete = budget >= 0
    return result


_Look: TypeAlias = Literal["tensor", "array", "dict", "container", "proxy", "module", "optimizer", "object"]
_Aim: TypeAlias = Purpose | Literal["state"] | None
"""Purpose of tensors that a search meets. An optimizer's state keeps the purpose at any depth; for other objects of
torch the purpose holds only in the object and its containers."""

# FSDP2 stores accumulated gradients here, not in `grad`, if the reduction has another dtype or comes later.
_ACCUMULATED = {"FSDPParam": "unsharded_accumulated_grad", "FSDPParamGroup": "_partial_reduce_output"}

# Tensors in these objects of torch are training state, not a cache that may be dropped.
_OF_TRAINING = (
    "torch.amp.",  # This includes the scale of a GradScaler.
    "torch.cuda.amp.",
    "torch.optim.",  # This includes counters of schedulers.
    "torch.distributed.algorithms.",  # This includes errors that communication hooks carry over.
)
# Torch modules of these packages are generated from other modules, and have constants as attributes.
_OF_PROGRAMS = ("torch.export.", "torch.fx.")

_NOT_INTO = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    types.CoroutineType,
    weakref.ReferenceType,
    *weakref.ProxyTypes,
    Context,
)


@by_type
def _choose_look(kind: type) -> tuple[_Look, Purpose | None]:
    """Return how objects of a type are searched, and the purpose of tensors in their attributes, if known."""
    torch, numpy, of = find_imported("torch"), find_imported("numpy"), kind.__module__
    if has_memory(kind):  # A type that is neither tensor nor array may have `nbytes`, too.
        if torch is not None and issubclass(kind, torch.Tensor):
            return "tensor", None
        if is_collection(kind) or (numpy is not None and issubclass(kind, numpy.ndarray)):
            return "array", None
    if issubclass(kind, dict):
        return "dict", None
    if kind is types.MappingProxyType:
        return "proxy", None
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return "container", None
    if torch is not None and issubclass(kind, torch.nn.Module):
        return "module", Purpose.BUFFERS if of.startswith(_OF_PROGRAMS) else None
    if torch is not None and issubclass(kind, torch.optim.Optimizer):
        return "optimizer", None
    if of.startswith(_OF_TRAINING):
        return "object", Purpose.OPTIMIZER
    return "object", Purpose.BUFFERS if of.startswith("torch.") else None


@by_type
def _is_barren(kind: type) -> bool:
    """Return whether values of a type can't hold tensors or arrays."""
    return kind in PLAIN or issubclass(kind, _NOT_INTO) or getattr(kind, "_colocate_barren", False) is True


@functools.cache
def _list_usual_names(torch: Any) -> frozenset[str]:
    """Return the names of the attributes that every torch module has, such as parameters and hooks."""
    return frozenset(vars(torch.nn.Module()))


def _group_by_kind(items: Iterable[Any]) -> dict[type, list[Any]]:
    groups: dict[type, list[Any]] = {}
    for item in items:
        if (kind := type(item)) in groups:
            groups[kind].append(item)
        elif not _is_barren(kind):
            groups[kind] = [item]
    return groups


def _list_values(mappings: Iterable[Any]) -> list[Any]:
    return [value for mapping in mappings if mapping for value in list(mapping.values()) if value is not None]


def _filter_searchable(items: list[Any]) -> list[Any]:
    """Return the items that may hold tensors or arrays, without inspecting each of a million strings.

    The garbage collector tracks objects that may refer to tracked objects, and arrays aren't tracked. So an untracked
    dict may hold arrays, or only strings and numbers.
    """
    searchable = [*filter(gc.is_tracked, items)]
    for kind in set(map(type, items)) - PLAIN if len(searchable) < len(items) else ():
        if kind in (dict, tuple):
            values: Callable[[Any], Iterable[Any]] = dict.values if kind is dict else iter
            rest: list[Any] = [item for item in items if type(item) is kind and not gc.is_tracked(item)]
            if not PLAIN.issuperset(map(type, chain.from_iterable(map(values, rest)))):
                searchable += [item for item in rest if not PLAIN.issuperset(map(type, tuple(values(item))))]
        elif _choose_look(kind)[0] == "array":
            searchable += [item for item in items if type(item) is kind and not gc.is_tracked(item)]
    return searchable


def _list_attributes(item: Any) -> list[Any]:
    """Return the values in an object's `__dict__` and `__slots__`, without reading properties."""
    kind = type(item)
    values = list(getattr(item, "__dict__", {}).values()) if kind.__dictoffset__ else []
    for slot in list_slots(kind):
        try:
            values.append(slot.__get__(item))
        except AttributeError:  # The attribute of this `__slots__` entry is unset.
            continue
    return values
