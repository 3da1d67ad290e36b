"""What a role holds: the memory of its tensors and arrays, found in its modules, optimizers and attributes.

An object's attributes are looked at, those of tensors and the object of a bound method too, containers are looked into,
and so on from what they hold; nobody's code is called. Models that share weights, views, and an optimizer beside its
model hold the same memory: what is counted is storages, each of them once.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, compress, islice
from typing import Any, TypeAlias

from colocate._protocol.ledger import Purpose
from colocate._role.context import Context
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate._values.leaves import PLAIN, is_collection
from colocate._values.leaving import has_memory, memories, slots
from colocate.worker.memory.storages import Storages

# A role may hold a data set of millions of small things. What is so far inside it that as many are nearer isn't found.
_LOOKS = 200_000


Holdings: TypeAlias = dict[Purpose, Storages]
"""What somebody has, by what it is for."""


def held_by(
    instance: object,
    declared: Iterable[Any] = (),
    apart: Iterable[object] = (),
    storages: Callable[[], Storages] = Storages,
) -> tuple[Holdings, bool]:
    """What an object holds, on the lane.

    Args:
        instance: The object, a role's instance.
        declared: What it says that it holds besides.
        apart: What isn't looked into, though it may lead there: other roles.
        storages: Makes what notes them.

    Returns:
        What was found, and whether that is all.
    """
    search = _Search(apart)
    complete = search.through(instance)
    search.note(Purpose.DECLARED, declared)
    search.note(Purpose.GRADIENTS, gradients_of(search.leaves))
    return search.found(storages), complete


def held_beside(
    instance: object, declared: Iterable[Any] = (), apart: Iterable[object] = ()
) -> tuple[Holdings, bool, list[Any]]:
    """What an object holds, beside the lane; see `held_by`.

    Returns:
        What was found, whether that is all, and the tensors whose gradients belong to it, too: see `Gradients`.
    """
    search = _Search(apart)
    complete = search.through(instance)
    search.note(Purpose.DECLARED, declared)
    return search.found(Storages), complete, search.leaves


def lie_in(
    values: Iterable[object], apart: Iterable[object], storages: Callable[[], Storages] = Storages
) -> tuple[Holdings, list[Any]]:
    """What residents hold, which may be values of any kind; see `held_by`.

    Where there is too much to look at, it is all that lies in their lists, dicts and dataclasses.

    Returns:
        What was found, and the tensors whose gradients belong to it, too.
    """
    search, roots = _Search(apart), list(values)
    if not search.through(*roots):
        search.note(Purpose.TENSORS, memories(roots))
    return search.found(storages), search.leaves


def lie_near(value: object, storages: Callable[[], Storages], looks: int) -> Holdings:
    """What lies in a value, among the things that are nearest in it; so many are looked at."""
    search = _Search((), looks)
    search.through(value)
    return search.found(storages)


def leaves_of(instance: object, apart: Iterable[object] = ()) -> list[Any]:
    """The tensors of an object that may have gradients; see `held_by`."""
    search = _Search(apart)
    search.through(instance)
    return search.leaves


def gradients_of(leaves: Iterable[Any]) -> list[Any]:
    """The gradients of tensors, on the lane."""
    return [gradient for each in leaves if each.is_leaf and (gradient := each.grad) is not None]


def optimizers_of(instance: object, apart: Iterable[object] = ()) -> list[Any]:
    """Torch's optimizers that an object holds; see `held_by`."""
    search = _Search(apart)
    search.through(instance)
    return search.optimizers


def leads_to(instance: object, other: object) -> bool:
    """Whether one role's object leads to another one's; see `held_by`."""
    search = _Search([other])
    search.through(instance)
    return search.met


class _Search:
    """Breadth first, so that what is nearest is found when there is too much.

    What is equally near is looked at together, by its type, and so are all pieces of memory in the end: most of the
    time is spent on what is done for each of them.
    """

    def __init__(self, apart: Iterable[object], most: int | None = None) -> None:
        """Begin. Args: apart: What isn't looked into. most: So many things of a container, and in all."""
        self._most = most
        self._noted: dict[Purpose, list[Any]] = {purpose: [] for purpose in Purpose}
        self._apart = list(apart)
        self._apart_ids = frozenset(map(id, self._apart))
        self._seen = set(self._apart_ids)
        self.met = False  # what isn't looked into
        self._parameters: set[int] = set()
        self._next: list[Any] = []
        self.leaves: list[Any] = []
        self.optimizers: list[Any] = []
        self._torch: Any = imported("torch")
        self._usual = frozenset[str]() if self._torch is None else _usual(self._torch)

    def through(self, *roots: object) -> bool:
        """Look at objects and all that they lead to; whether it came to an end."""
        left = self._most or _LOOKS
        self._next += roots
        while self._next:
            near, self._next = self._next[: self._most], []
            for kind, items in self._new(near).items():
                if left <= 0:
                    return False
                _look_at(kind)(self, items[:left])
                left -= len(items)
        return left >= 0

    def found(self, storages: Callable[[], Storages]) -> Holdings:
        """The memory of what was found."""
        held = {purpose: storages() for purpose in Purpose}
        for purpose, values in self._noted.items():
            held[purpose].add_all(values)
        return held

    def note(self, purpose: Purpose, values: Iterable[Any]) -> None:
        """Note the memory of values."""
        self._noted[purpose] += values

    def _note_in(self, purpose: Purpose, values: Iterable[Any]) -> None:
        """Note the memory of values, and of what lies in containers among them."""
        left, seen = [list(values)], set[int]()
        while left:
            for kind, items in _by_kind(left.pop()).items():
                look = _look_at(kind)
                if look in (_Search._tensors, _Search._memories):
                    self.note(purpose, items)
                elif look in (_Search._dicts, _Search._containers):
                    new = [each for each in items if id(each) not in seen]
                    seen.update(map(id, new))
                    # Each is copied in one step, as in `_all`.
                    left += map(list, map(dict.values, new) if look is _Search._dicts else new)

    def _new(self, items: Iterable[Any]) -> dict[type, list[Any]]:
        """What wasn't seen yet, each once, by type."""
        by_id = dict(zip(map(id, items), items, strict=True))
        known = by_id.keys() & self._seen
        self.met |= not self._apart_ids.isdisjoint(known)
        for key in known:
            del by_id[key]
        self._seen.update(by_id)
        return _by_kind(by_id.values())

    def _all(self, items: Iterable[Any]) -> None:
        copied = list(islice(items, self._most))  # in one step: other threads go on with theirs
        if PLAIN.issuperset(map(type, copied)):
            return
        tracked = [*filter(gc.is_tracked, copied)]
        self._next += tracked
        if len(tracked) < len(copied):
            self._next += _with_arrays(copied)

    def _containers(self, items: list[Any]) -> None:
        for item in items:
            self._all(item)

    def _dicts(self, items: list[Any]) -> None:
        for item in items:
            self._all(dict.values(item))  # a class made from it may load something when it is asked for them

    def _objects(self, items: list[Any]) -> None:
        kind = type(items[0])
        if name := _accumulates_in(kind):
            gradients = [gradient for item in items if (gradient := getattr(item, name, None)) is not None]
            self._seen.update(map(id, gradients))
            self.note(Purpose.GRADIENTS, gradients)
        purpose = _purpose_in(kind)
        for item in items:
            held = _attributes(item)
            if purpose is not None:
                self._note_in(purpose, held)
            self._all(held)

    def _modules(self, modules: list[Any]) -> None:
        owns = [*map(vars, modules)]
        names = "_parameters", "_buffers", "_modules"
        parameters, buffers, below = (_values([held for own in owns if (held := own.get(name))]) for name in names)
        self._next += below
        purpose = _purpose_in(type(modules[0]))
        # By name: those of a kind have nearly always the same few that not every module has. A hundred at a time, in
        # case each of them has its own.
        for some in [owns[i : i + 100] for i in range(0, len(owns), 100)]:
            for name in set[str]().union(*some) - self._usual:
                held = [own.get(name) for own in some]
                if purpose is not None:
                    self._note_in(purpose, held)
                self._all(held)
        self._note_parameters(parameters)
        self._seen.update(map(id, buffers))
        self.note(Purpose.BUFFERS, buffers)

    def _note_parameters(self, parameters: list[Any]) -> None:
        known = self._parameters
        by_id = {key: each for each in parameters if (key := id(each)) not in known and each is not None}
        known.update(by_id)
        self._seen.update(by_id)
        self.note(Purpose.PARAMETERS, by_id.values())
        self.leaves += by_id.values()
        self._attached(by_id.values())

    def _optimizers(self, optimizers: list[Any]) -> None:
        states: list[Any] = []
        options: list[Any] = []
        for optimizer in optimizers:
            own = dict(vars(optimizer))
            # One that wraps another one may have none of these, or properties that ask that one.
            groups, state = own.pop("param_groups", None), own.pop("state", None)
            own.pop("defaults", None)
            self._all(own.values())
            if groups is None:
                continue
            self.optimizers.append(optimizer)
            for group in list(groups):
                self._note_parameters(list(group["params"]))
                options += [value for name, value in list(group.items()) if name != "params"]
            kept = list((state or {}).values())
            dicts = [each for each in kept if isinstance(each, dict)]
            states += _values(dicts)
            if len(dicts) < len(kept):
                states += [each for each in kept if not isinstance(each, dict)]
        self._of_optimizers(states)
        self._of_optimizers(options)

    def _of_optimizers(self, values: list[Any]) -> None:
        kinds = set(map(type, values))
        tensors = set(filter(has_memory, kinds - PLAIN))
        self.note(Purpose.OPTIMIZER, values if kinds == tensors else [each for each in values if type(each) in tensors])
        others = kinds - PLAIN - tensors
        if not others:
            return
        # By itself: what lies in such objects is the optimizer's state, though the role may have it elsewhere, too.
        search = _Search([*self._apart, *self.optimizers])
        search.through(*[value for value in values if type(value) in others])
        for found in search._noted.values():
            self.note(Purpose.OPTIMIZER, found)

    def _tensors(self, tensors: list[Any]) -> None:
        # Torch's own check is made in Python: nothing to do for each plain tensor.
        if type(tensors[0]) is not self._torch.Tensor:
            is_parameter = [isinstance(each, self._torch.nn.Parameter) for each in tensors]
            self._note_parameters(list(compress(tensors, is_parameter)))
            tensors = [each for each, its in zip(tensors, is_parameter, strict=True) if not its]
        self.note(Purpose.TENSORS, tensors)
        self.leaves += tensors
        self._attached(tensors)

    def _attached(self, tensors: Iterable[Any]) -> None:
        # Nearly none has attributes, and to ask one for them would make it a dict. The garbage collector's way doesn't.
        found = gc.get_referents(*tensors)
        if dict not in set(map(type, found)):
            return
        for held in found:
            if type(held) is dict:
                if (gradient := held.get("main_grad")) is not None:  # Megatron's, in another dtype than the parameter's
                    self._seen.add(id(gradient))
                    self.note(Purpose.GRADIENTS, [gradient])
                self._all(held.values())

    def _memories(self, items: list[Any]) -> None:
        self.note(Purpose.TENSORS, items)
        numpy = imported("numpy")
        for item in items:
            if numpy is not None and isinstance(item, numpy.ndarray) and item.dtype.hasobject:
                self._all(item.ravel().tolist())

    def _proxies(self, items: list[Any]) -> None:
        self._next += gc.get_referents(*items)  # their mappings, which may be of a kind that runs code when it is asked


@functools.cache
def _usual(torch: Any) -> frozenset[str]:
    """What every module has: its parameters, hooks and the like."""
    return frozenset(vars(torch.nn.Module()))


def _values(dicts: list[Any]) -> list[Any]:
    """What lies in dicts, or what is like them, but what is plain there."""
    found = None
    if {dict}.issuperset(map(type, dicts)):
        # The garbage collector's way is three times as fast. It goes to the keys, too, where they aren't all strings.
        referents = gc.get_referents(*dicts)
        if len(referents) == sum(map(len, dicts)):
            found = referents
    if found is None:
        found = [*chain.from_iterable(each.values() for each in dicts)]
    return found if PLAIN.isdisjoint(map(type, found)) else [each for each in found if type(each) not in PLAIN]


def _by_kind(items: Iterable[Any]) -> dict[type, list[Any]]:
    """Items by type, but those in which nothing is to be found."""
    found: dict[type, list[Any]] = {}
    for item in items:
        if (kind := type(item)) in found:
            found[kind].append(item)
        elif not _is_barren(kind):
            found[kind] = [item]
    return found


def _with_arrays(items: Iterable[Any]) -> list[Any]:
    """The arrays among items that the garbage collector doesn't track, and dicts and tuples that hold such things.

    It tracks what may refer to others that it tracks, which arrays aren't: so a dict of them is as the many that have
    strings and numbers only.
    """
    by_kind: dict[type, list[Any]] = {}
    for kind in set(map(type, items)) - PLAIN:
        if kind in (dict, tuple) or _look_at(kind) is _Search._memories:
            by_kind[kind] = [each for each in items if type(each) is kind and not gc.is_tracked(each)]
    for kind in by_kind.keys() & {dict, tuple}:
        values: Callable[[Any], Iterable[Any]] = dict.values if kind is dict else iter
        if PLAIN.issuperset(map(type, chain.from_iterable(map(values, by_kind[kind])))):
            del by_kind[kind]
        else:
            # Copied in one step, as in `_all`.
            by_kind[kind] = [each for each in by_kind[kind] if not PLAIN.issuperset(map(type, tuple(values(each))))]
    return [*chain.from_iterable(by_kind.values())]


@by_type
def _look_at(kind: type) -> Callable[[_Search, list[Any]], None]:
    """How objects of a type are looked at, one or more of them."""
    torch, numpy = imported("torch"), imported("numpy")
    if has_memory(kind):  # others may call an attribute `nbytes` too, and hold tensors
        if torch is not None and issubclass(kind, torch.Tensor):
            return _Search._tensors
        if is_collection(kind) or (numpy is not None and issubclass(kind, numpy.ndarray)):
            return _Search._memories
    if issubclass(kind, dict):
        return _Search._dicts
    if kind is types.MappingProxyType:
        return _Search._proxies
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return _Search._containers
    if torch is not None and issubclass(kind, torch.nn.Module):
        return _Search._modules
    if torch is not None and issubclass(kind, torch.optim.Optimizer):
        return _Search._optimizers
    return _Search._objects


# What FSDP2 has accumulated and not reduced yet is in no parameter's `grad` where it is reduced in another dtype, nor
# where replicas of shards are told of it later.
_ACCUMULATED = {"FSDPParam": "unsharded_accumulated_grad", "FSDPParamGroup": "_partial_reduce_output"}


@by_type
def _accumulates_in(kind: type) -> str | None:
    """The attribute in which objects of a type of torch's have gradients."""
    return _ACCUMULATED.get(kind.__name__) if kind.__module__.startswith("torch.distributed.fsdp.") else None


# What objects of torch's own have is no cache: contents that must not be lost. State of training, or constants.
_OF_TRAINING = (
    "torch.amp.",  # the scale of a GradScaler
    "torch.cuda.amp.",
    "torch.optim.",  # what schedulers count
    "torch.distributed.algorithms.",  # what hooks of communication owe
)
_OF_PROGRAMS = ("torch.export.", "torch.fx.")  # modules that were made of others, with their constants as attributes


@by_type
def _purpose_in(kind: type) -> Purpose | None:
    """What tensors in attributes of objects of a type are for, where the type says so."""
    name = kind.__module__
    if _look_at(kind) is _Search._modules:
        return Purpose.BUFFERS if name.startswith(_OF_PROGRAMS) else None
    if name.startswith(_OF_TRAINING):
        return Purpose.OPTIMIZER
    return Purpose.BUFFERS if name.startswith("torch.") else None


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
def _is_barren(kind: type) -> bool:
    """Whether nothing is to be found in values of this type."""
    return kind in PLAIN or issubclass(kind, _NOT_INTO)


def _attributes(item: Any) -> list[Any]:
    """What an object has in its own dict and slots; no property is asked."""
    kind = type(item)
    found = list(getattr(item, "__dict__", {}).values()) if _has_dict(kind) else []
    for slot in slots(kind):
        try:
            found.append(slot.__get__(item))
        except AttributeError:  # nothing is in it
            continue
    return found


@by_type
def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)
