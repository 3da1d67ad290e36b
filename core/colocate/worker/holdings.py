"""What a role holds: the memory of its tensors and arrays, found in its modules, optimizers and attributes.

An object's attributes are looked at, containers are looked into, and so on from what they hold; nobody's code is
called. Models that share weights, views, and an optimizer beside its model hold the same memory: what is counted is
storages, each of them once.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from colocate._protocol.ledger import Purpose
from colocate._role.context import Context
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate._values.leaves import is_collection
from colocate._values.leaving import has_memory, memories, sparse_parts
from colocate._values.tree import PLAIN
from colocate.gpus import in_use

# A role may hold a data set of millions of small things. What is so far inside it that as many are nearer isn't found.
_LOOKS = 200_000


class Storages(dict[str, dict[int, int]]):
    """Pieces of memory that tensors and arrays may share: by device, as torch has it, the size of each by its address.

    There are no objects for them: a hundred thousand new ones would have the garbage collector look at all others.
    """

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
            self.add_plain(item)

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Note those of the tensors that a tensor is made of."""
        for part in [*values, *indices]:
            self.add_tensor(part, torch)

    def add_plain(self, item: Any) -> None:
        """Note that of a tensor which has one."""
        try:
            storage = item.untyped_storage()
            address = storage.data_ptr()
        except RuntimeError:  # of one that somebody has kept of what `torch.func` had transformed
            return
        if nbytes := storage.nbytes():
            device = _name_of(item.device)
            pieces = self.get(device)
            if pieces is None:
                pieces = self[device] = {}
            pieces[address] = nbytes

    def _add_array(self, item: Any) -> None:
        numpy = imported("numpy")
        if numpy is None or not isinstance(item, numpy.ndarray):
            return
        while isinstance(item.base, numpy.ndarray):
            item = item.base
        torch = imported("torch")
        if torch is not None and isinstance(item.base, torch.Tensor):  # `tensor.numpy()`
            self.add_tensor(item.base, torch)
        elif item.nbytes:
            self.add_plain_array(item)

    def add_plain_array(self, item: Any) -> None:
        """Note that of an array which is no view of another one."""
        self.setdefault("cpu", {})[item.__array_interface__["data"][0]] = item.nbytes


class Versions(Storages):
    """Storages, and how often their tensors have been written into, as far as torch knows.

    Attributes:
        written: That.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def add_plain(self, item: Any) -> None:
        """Note that of a tensor which has one."""
        super().add_plain(item)
        if not item.is_inference():
            self.written += item._version


class Objects(Storages):
    """Storages with the objects themselves, where they are a device's: these are named by what torch has for them.

    That stays when their memory goes.

    Attributes:
        storages: They, by that.
        trained: What those of tensors that have gradients are called, and such pieces of the host.
        indices: Likewise, of tensors that say where the values of a sparse or a jagged one are.
        pinned: Pieces of the host that a device reads and writes by itself, at the pages that they have.
        plain: The sizes of pieces that may be filled with zeros; tensors and arrays may be views of memory that isn't
            theirs, even of constant `bytes`, and arrays may consist of references to objects. Torch tells no
            difference between such tensors and those of which there was an array, by `tensor.numpy()`.
        gone: What tells whether a piece of the host was let go of, and somebody else may lie there.
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
        self.plain: dict[int, int] = {}
        self.gone: dict[int, Callable[[], bool]] = {}
        self.tensors: dict[int, list[weakref.ref[Any]]] = {}

    def join(self, more: Objects) -> None:
        """Note what others note, too."""
        for place, sizes in more.items():
            self.setdefault(place, {}).update(sizes)
        self.storages.update(more.storages)
        self.trained |= more.trained
        self.indices |= more.indices
        self.pinned |= more.pinned
        self.plain.update(more.plain)
        self.gone.update(more.gone)
        self.tensors.update(more.tensors)

    def add_parts(self, item: Any, values: list[Any], indices: list[Any], torch: Any) -> None:
        """Note those of the tensors that a tensor is made of. It is that which has gradients, not they."""
        super().add_parts(item, values, indices, torch)
        self.indices.update(self._keys(indices, torch))
        if item.requires_grad:
            self.trained.update(self._keys(values, torch))

    def add_plain(self, item: Any) -> None:
        """Note that of a tensor which has one."""
        if (storage := _storage_of(item)) is None:
            return
        key, device = _key(storage), _name_of(item.device)
        self.tensors.setdefault(key, []).append(weakref.ref(item))
        if device == "cpu":
            super().add_plain(item)
            self.gone[key] = _is_gone(storage)
            if self._pins and item.is_pinned():
                self.pinned.add(key)
        else:
            self.setdefault(device, {})[key] = storage.nbytes()
            self.storages[key] = storage
        if device != "cpu" or storage.resizable():  # a device's that isn't its own stays there
            self.plain[key] = storage.nbytes()
        if item.requires_grad:
            self.trained.add(key)

    def _keys(self, parts: Iterable[Any], torch: Any) -> Iterable[int]:
        plain = (part for part in parts if not _is_made_of_others(part, torch))
        return [_key(storage) for part in plain if (storage := _storage_of(part)) is not None]

    def add_plain_array(self, item: Any) -> None:
        """Note that of an array which is no view of another one."""
        super().add_plain_array(item)
        key = item.__array_interface__["data"][0]
        reference = weakref.ref(item)
        self.gone[key] = lambda: reference() is None
        if item.flags.owndata and not item.dtype.hasobject:
            self.plain[key] = item.nbytes


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


def _is_gone(storage: Any) -> Callable[[], bool]:
    """What tells whether it is."""
    from torch.multiprocessing.reductions import StorageWeakRef

    expired: Callable[[], bool] = StorageWeakRef(storage).expired  # type: ignore[no-untyped-call]
    return expired


def _key(storage: Any) -> int:
    return int(storage.data_ptr() if _name_of(storage.device) == "cpu" else storage._cdata)


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


Holdings: TypeAlias = dict[Purpose, Storages]
"""What somebody has, by what it is for."""


def held_by(
    instance: object,
    declared: Iterable[Any] = (),
    apart: Iterable[object] = (),
    storages: Callable[[], Storages] = Storages,
    gradients: Storages | None = None,
) -> tuple[Holdings, bool]:
    """What an object holds.

    Args:
        instance: The object, a role's instance.
        declared: What it says that it holds besides.
        apart: What isn't looked into, though it may lead there: other roles.
        storages: Makes what notes them.
        gradients: Those that it has, where they must not be looked at: beside the lane, see `Gradients`.

    Returns:
        What was found, and whether that is all.
    """
    search = _Search(apart, storages, gradients)
    complete = search.through(instance)
    for value in declared:
        search.add(Purpose.DECLARED, value)
    return search.found, complete


def optimizers_of(instance: object, apart: Iterable[object] = ()) -> list[Any]:
    """Torch's optimizers that an object holds; see `held_by`."""
    search = _Search(apart, Storages)
    search.through(instance)
    return search.optimizers


class _Search:
    """Breadth first, so that what is nearest is found when there is too much."""

    def __init__(
        self, apart: Iterable[object], storages: Callable[[], Storages], gradients: Storages | None = None
    ) -> None:
        self.found: Holdings = {purpose: storages() for purpose in Purpose}
        self._has_gradients = gradients is not None
        if gradients is not None:
            self.found[Purpose.GRADIENTS] = gradients
        self._apart = list(apart)
        self._seen = {id(each) for each in self._apart}
        self._parameters: set[int] = set()
        self._todo: deque[Any] = deque()
        self.optimizers: list[Any] = []
        self._torch: Any = imported("torch")
        # What every module has: its parameters, hooks and the like.
        self._plain = () if self._torch is None else (self._torch.nn.Parameter, self._torch.Tensor)
        self._usual = () if self._torch is None else vars(self._torch.nn.Module()).keys()

    def through(self, root: object) -> bool:
        """Look at an object and all that it leads to; whether it came to an end."""
        self._todo.append(root)
        looks = 0
        while self._todo:
            looks += 1
            if looks > _LOOKS:
                return False
            self._look(self._todo.popleft())
        return True

    def _look(self, item: Any) -> None:
        if id(item) in self._seen:
            return
        self._seen.add(id(item))
        if self._is_memory(item):
            self._tensor(item)
        elif isinstance(item, dict):
            self._all(dict.values(item))  # a class made from it may load something when it is asked for them
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            self._all(item)
        elif self._torch is not None and isinstance(item, self._torch.nn.Module):
            self._module(item)
        elif self._torch is not None and isinstance(item, self._torch.optim.Optimizer):
            self._optimizer(item)
        else:
            if (name := _accumulates_in(type(item))) and (gradient := getattr(item, name, None)) is not None:
                self._seen.add(id(gradient))
                if not self._has_gradients:
                    self.add(Purpose.GRADIENTS, gradient)
            self._all(_attributes(item))

    def _is_memory(self, item: Any) -> bool:
        # Others may call an attribute `nbytes` too, and hold tensors.
        kind = type(item)
        if not has_memory(kind):
            return False
        numpy = imported("numpy")
        return (
            is_collection(kind)
            or (self._torch is not None and isinstance(item, self._torch.Tensor))
            or (numpy is not None and isinstance(item, numpy.ndarray))
        )

    def _all(self, items: Iterable[Any]) -> None:
        copied = list(items)  # in one step: other threads go on with theirs
        if not PLAIN.issuperset(map(type, copied)):
            self._todo.extend([each for each in copied if _may_lead(each)])

    def _module(self, module: Any) -> None:
        own = vars(module)
        for parameter in list(own.get("_parameters", {}).values()):
            if parameter is not None:
                self._parameter(parameter)
        for buffer in list(own.get("_buffers", {}).values()):
            if buffer is not None:
                self._seen.add(id(buffer))
                self.add(Purpose.BUFFERS, buffer)
        self._todo.extend(each for each in list(own.get("_modules", {}).values()) if each is not None)
        self._all([own[name] for name in own.keys() - self._usual])

    def _parameter(self, parameter: Any) -> None:
        if id(parameter) in self._parameters:
            return
        self._parameters.add(id(parameter))
        self._seen.add(id(parameter))
        self.add(Purpose.PARAMETERS, parameter)
        self._gradient(parameter)

    def _gradient(self, item: Any) -> None:
        if not self._has_gradients and item.is_leaf and item.grad is not None:
            self.add(Purpose.GRADIENTS, item.grad)

    def _optimizer(self, optimizer: Any) -> None:
        self.optimizers.append(optimizer)
        for group in list(optimizer.param_groups):
            for parameter in list(group["params"]):
                self._parameter(parameter)
            self.add(Purpose.OPTIMIZER, [value for name, value in list(group.items()) if name != "params"])
        for state in list(optimizer.state.values()):
            for value in list(state.values()) if isinstance(state, dict) else [state]:
                self.add(Purpose.OPTIMIZER, value)
        own = vars(optimizer)
        self._all([value for name, value in list(own.items()) if name not in ("state", "param_groups", "defaults")])

    def _tensor(self, item: Any) -> None:
        if self._torch is not None and isinstance(item, self._torch.nn.Parameter):
            self._parameter(item)
            return
        if self._torch is not None and isinstance(item, self._torch.Tensor):
            self._gradient(item)
        self.add(Purpose.TENSORS, item)

    def add(self, purpose: Purpose, value: Any) -> None:
        """Note the memory of a value."""
        if (
            type(value) in self._plain and value.layout is self._torch.strided and not value.is_meta
        ):  # as nearly all are
            self.found[purpose].add_plain(value)
        else:
            self.found[purpose].add(value)


@functools.lru_cache(maxsize=64)
def _name_of(device: Any) -> str:
    return str(device)


# What FSDP2 has accumulated and not reduced yet is in no parameter's `grad` where it is reduced in another dtype, nor
# where replicas of shards are told of it later.
_ACCUMULATED = {"FSDPParam": "unsharded_accumulated_grad", "FSDPParamGroup": "_partial_reduce_output"}


@by_type
def _accumulates_in(kind: type) -> str | None:
    """The attribute in which objects of a type of torch's have gradients."""
    return _ACCUMULATED.get(kind.__name__) if kind.__module__.startswith("torch.distributed.fsdp.") else None


_NOT_INTO = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    types.CoroutineType,
    weakref.ReferenceType,
    *weakref.ProxyTypes,
    Context,
)


def _may_lead(item: Any) -> bool:
    """Whether memory may be found from here. The garbage collector knows what refers to nothing."""
    kind = type(item)
    return not _is_barren(kind) and (gc.is_tracked(item) or has_memory(kind))


@by_type
def _is_barren(kind: type) -> bool:
    """Whether nothing is to be found in values of this type."""
    return kind in PLAIN or issubclass(kind, _NOT_INTO)


@by_type
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """A type's slots, also private ones and those that a base has under the same name."""
    members = (member for base in kind.__mro__ if base is not object for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


def _attributes(item: Any) -> list[Any]:
    """What an object has in its own dict and slots; no property is asked."""
    kind = type(item)
    found = list(getattr(item, "__dict__", {}).values()) if _has_dict(kind) else []
    for slot in _slots(kind):
        try:
            found.append(slot.__get__(item))
        except AttributeError:  # nothing is in it
            continue
    return found


@by_type
def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)
