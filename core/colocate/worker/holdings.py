"""What a role holds: the memory of its tensors and arrays, found in its modules, optimizers and attributes.

An object's attributes are looked at, containers are looked into, and so on from what they hold; nobody's code is
called. Models that share weights, views, and an optimizer beside its model hold the same memory: what is counted is
storages, each of them once.
"""

from __future__ import annotations

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
from colocate._values.leaving import has_memory
from colocate._values.tree import PLAIN
from colocate.worker.storages import Storages

# A role may hold a data set of millions of small things. What is so far inside it that as many are nearer isn't found.
_LOOKS = 200_000


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
        _look_at(type(item))(self, item)

    def _all(self, items: Iterable[Any]) -> None:
        copied = list(items)  # in one step: other threads go on with theirs
        if not PLAIN.issuperset(map(type, copied)):
            self._todo.extend([each for each in copied if _may_lead(each)])

    def _dict(self, item: Any) -> None:
        self._all(dict.values(item))  # a class made from it may load something when it is asked for them

    def _object(self, item: Any) -> None:
        if (name := _accumulates_in(type(item))) and (gradient := getattr(item, name, None)) is not None:
            self._seen.add(id(gradient))
            if not self._has_gradients:
                self.add(Purpose.GRADIENTS, gradient)
        held = _attributes(item)
        if (purpose := _purpose_in(type(item))) is not None:
            self.add(purpose, held)
        self._all(held)

    def _module(self, module: Any) -> None:
        own = vars(module)
        if parameters := own.get("_parameters"):
            for parameter in list(parameters.values()):
                if parameter is not None:
                    self._parameter(parameter)
        if buffers := own.get("_buffers"):
            for buffer in list(buffers.values()):
                if buffer is not None:
                    self._seen.add(id(buffer))
                    self.add(Purpose.BUFFERS, buffer)
        if modules := own.get("_modules"):
            self._todo.extend([each for each in list(modules.values()) if each is not None])
        if more := own.keys() - self._usual:
            self._all([own[name] for name in more])

    def _parameter(self, parameter: Any) -> None:
        key = id(parameter)
        if key in self._parameters:
            return
        self._parameters.add(key)
        self._seen.add(key)
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
        # Torch's own check is made in Python: nothing to do for each plain tensor.
        if type(item) is not self._torch.Tensor and isinstance(item, self._torch.nn.Parameter):
            self._parameter(item)
            return
        self._gradient(item)
        self.add(Purpose.TENSORS, item)

    def _memory(self, item: Any) -> None:
        self.add(Purpose.TENSORS, item)

    def add(self, purpose: Purpose, value: Any) -> None:
        """Note the memory of a value."""
        if (
            type(value) in self._plain and value.layout is self._torch.strided and not value.is_meta
        ):  # as nearly all are
            self.found[purpose].add_plain(value)
        else:
            self.found[purpose].add(value)


@by_type
def _look_at(kind: type) -> Callable[[_Search, Any], None]:
    """How objects of a type are looked at."""
    torch, numpy = imported("torch"), imported("numpy")
    if has_memory(kind):  # others may call an attribute `nbytes` too, and hold tensors
        if torch is not None and issubclass(kind, torch.Tensor):
            return _Search._tensor
        if is_collection(kind) or (numpy is not None and issubclass(kind, numpy.ndarray)):
            return _Search._memory
    if issubclass(kind, dict):
        return _Search._dict
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return _Search._all
    if torch is not None and issubclass(kind, torch.nn.Module):
        return _Search._module
    if torch is not None and issubclass(kind, torch.optim.Optimizer):
        return _Search._optimizer
    return _Search._object


# What FSDP2 has accumulated and not reduced yet is in no parameter's `grad` where it is reduced in another dtype, nor
# where replicas of shards are told of it later.
_ACCUMULATED = {"FSDPParam": "unsharded_accumulated_grad", "FSDPParamGroup": "_partial_reduce_output"}


@by_type
def _accumulates_in(kind: type) -> str | None:
    """The attribute in which objects of a type of torch's have gradients."""
    return _ACCUMULATED.get(kind.__name__) if kind.__module__.startswith("torch.distributed.fsdp.") else None


# What objects of torch's own have beside modules and optimizers is no cache: contents that must not be lost.
_PURPOSES = {
    "torch.amp.": Purpose.OPTIMIZER,  # the scale of a GradScaler
    "torch.cuda.amp.": Purpose.OPTIMIZER,
    "torch.optim.": Purpose.OPTIMIZER,  # what schedulers count
    "torch.utils.data.": Purpose.BUFFERS,  # data sets
    "torch.distributions.": Purpose.BUFFERS,
}


@by_type
def _purpose_in(kind: type) -> Purpose | None:
    """What tensors in attributes of objects of a type are for, where the type says so."""
    return next((purpose for name, purpose in _PURPOSES.items() if kind.__module__.startswith(name)), None)


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
