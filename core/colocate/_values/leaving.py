"""Convert the tensors in arguments and results, and detect writes in place.

A method gets its tensors on its slot's device, wherever they were made. Results have no autograd graph. Tensors in
records, the attributes of users' dataclasses and similar classes, are included.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import types
from collections import UserDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs

from colocate._definitions.codec import is_trained
from colocate._definitions.structure import structure_of
from colocate._devices.copies import Copies, expose_buffer, view_bytes
from colocate._system.by_type import by_type
from colocate._system.imported import find_imported
from colocate._system.jobs import format_error
from colocate._values.kinds import is_collection
from colocate._values.leaves import map_leaves
from colocate._values.plain import are_plain, is_plain
from colocate.errors import DispatchError

_PLAIN = (int, float, str, type(None))
_COMPARED = (*_PLAIN, complex, bytes, bytearray)


@by_type
def list_fields(kind: type) -> tuple[str, ...]:
    """Return the attributes of a record type that hold values; empty for other types.

    Records are dataclasses, attrs classes, and `UserDict`.
    """
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, UserDict):
        return ("data",)
    return tuple(field.name for field in attrs.fields(kind)) if attrs.has(kind) else ()


@by_type
def is_record(kind: type) -> bool:
    """Return whether values of a type have parts to search: a record's fields, or a `register_batch` structure."""
    return structure_of(kind) is not None or bool(list_fields(kind))


def _list_contents(item: Any) -> list[Any]:
    kind: type = type(item)
    if (structure := structure_of(kind)) is not None:
        return [structure.open_value(item)]
    return [getattr(item, name, None) for name in list_fields(kind)]


@by_type
def list_slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Return the `__slots__` descriptors of a type and all base classes, including private and repeated names."""
    members = (member for base in kind.__mro__ if base is not object for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


class CopyError(Exception):
    """Raised if a record can't be copied, or the copy's attributes can't be set."""


class Records:
    """Copies records with changed contents, without changing the original records.

    Each record is copied once, so that shared references stay shared and cycles stay cycles. This class doesn't refer
    to objects that use it, because such a reference cycle would keep copies alive until a garbage collection.
    """

    def __init__(self, by_itself: Callable[[Any], Any] | None = None) -> None:
        """Create an empty collection of copies.

        Args:
            by_itself: Copies a record by code of its class; None to run no such code.
        """
        self._by_itself = by_itself
        # Maps an id to a record and the copy, which is None while no copy is needed.
        self._results: dict[int, tuple[Any, Any]] = {}
        self._open_ids: list[int] | None = None  # Lists the records of one outermost record; None between calls.
        self._leads_back = self._copies_back = False

    def rebuild_record(self, item: Any, change: Callable[[Any], Any]) -> Any:
        """Return a copy of a record with changed contents, or the record itself if nothing changes.

        Args:
            item: The record.
            change: Returns the new value of an attribute, or the same object; calls this method for nested records.

        Raises:
            CopyError: The record can't be copied.
        """
        original, result = self._results.get(id(item), (None, None))
        if result is not None:
            return result
        if original is not None:  # The record contains itself.
            self._leads_back = True
            if not self._copies_back:
                return item
            if structure_of(type(item)) is not None:
                raise CopyError("it is one of its own leaves")
            result = self._copy_record(item)
            self._results[id(item)] = item, result
            return result
        if self._open_ids is None:
            return self._rebuild_outermost(item, change)
        self._open_ids.append(id(item))
        self._results[id(item)] = item, None
        result = item
        try:  # This code is inlined, so that nested records don't need more stack frames.
            if (structure := structure_of(type(item))) is not None:
                leaves = structure.open_value(item)
                if (new := change(leaves)) is not leaves:
                    result = structure.make_value(type(item), new)
                return result
            changed = {}
            for name in list_fields(type(item)):
                old = getattr(item, name, None)
                if (new := change(old)) is not old:
                    changed[name] = new
            copied = self._results[id(item)][1]
            if changed and copied is None:
                copied = self._copy_record(item)
            for name, new in changed.items():
                try:
                    object.__setattr__(copied, name, new)  # A plain `setattr` fails for a frozen class.
                except AttributeError as error:
                    raise CopyError(f"{name} can't be set") from error
            result = item if copied is None else copied
        finally:
            self._results[id(item)] = item, result
        return result

    def _rebuild_outermost(self, item: Any, change: Callable[[Any], Any]) -> Any:
        self._open_ids, self._leads_back, self._copies_back = [], False, False
        try:
            result = self.rebuild_record(item, change)
            if self._leads_back and result is not item:  # Copy again, so that references in cycles lead to copies.
                for key in self._open_ids:
                    del self._results[key]
                self._open_ids, self._copies_back = [], True
                result = self.rebuild_record(item, change)
            return result
        finally:
            self._open_ids = None

    def _copy_record(self, item: Any) -> Any:
        if self._by_itself is not None:
            try:
                duplicate = self._by_itself(item)
            except Exception as error:
                raise CopyError(format_error(error)) from error
            if duplicate is not item:
                return duplicate
        kind = type(item)
        try:
            duplicate = object.__new__(kind)
            if kind.__dictoffset__:
                vars(duplicate).update(vars(item))
            for member in list_slots(kind):
                with contextlib.suppress(AttributeError):  # The attribute of a `__slots__` entry may be unset.
                    member.__set__(duplicate, member.__get__(item))
        except (AttributeError, TypeError) as error:  # `object.__new__` can't create objects of some types.
            raise CopyError(str(error)) from error
        return duplicate


def place_arguments(arguments: dict[str, Any], device: str, host: Collection[str] = ()) -> dict[str, Any]:
    """Return a method's arguments with tensors on a device, but with the tensors of parameters in `host` on the CPU.

    A tensor on the right device stays the same object.
    """
    torch = find_imported("torch")
    if torch is None:
        return arguments
    device_moves, host_moves = _Mover(torch, device), _Mover(torch, "cpu")
    try:
        return {
            name: (host_moves if name in host else device_moves).move_value(value) for name, value in arguments.items()
        }
    finally:
        device_moves.copies.wait_for_copies()


def move_to_device(value: Any, device: str) -> Any:
    return place_arguments({"": value}, device)[""]


def move_to_one_device(values: Sequence[Any]) -> Sequence[Any]:
    """Return values with all tensors on the device of the first value's first tensor."""
    first = next(iter(list_tensors(values[0])), None)
    return values if first is None else [move_to_device(value, str(first.device)) for value in values]


class _Mover:
    """Moves the tensors of values to one device, each tensor only once, so that shared tensors stay shared.

    A moved model and its optimizer, for example, have the same parameters.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        self.copies = Copies(self._device)
        self._records = Records(copy.copy)
        # Maps an id to the original, which is kept so that the id isn't reused, and the moved tensor.
        self._moved: dict[int, tuple[Any, Any]] = {}
        self._memo: dict[int, Any] = {}  # Passes moved tensors to `copy.deepcopy`.

    def move_value(self, value: Any) -> Any:
        return map_leaves(value, self._move_leaf, _may_hold_tensors)

    def _move_leaf(self, item: Any) -> Any:
        kind: type = type(item)
        if not _may_hold_tensors(kind):
            return item
        if _is_whole(kind):
            entry = self._moved.get(id(item))
            if entry is None:
                entry = self._moved[id(item)] = item, self._create_moved(item, kind)
            return entry[1]
        try:
            # This needs one stack frame less per nested record than `self.move_value`.
            return self._records.rebuild_record(
                item, functools.partial(map_leaves, leaf=self._move_leaf, matters=_may_hold_tensors)
            )
        except CopyError as error:
            raise DispatchError(
                f"an argument has a {kind.__qualname__} with tensors that aren't on {self._device}, and it can't "
                f"be copied ({error}): give its tensors by themselves, or name the parameter in @method(host=...) and "
                "move them in the method"
            ) from error

    def _create_moved(self, item: Any, kind: type) -> Any:
        torch = self._torch
        if isinstance(item, torch.Tensor):
            if self._is_placed(item):
                return item
            if not is_trained(item):
                return self.copies.copy_tensor(item)
            if isinstance(item, torch.nn.parameter.UninitializedTensorMixin):
                return type(item)(item.requires_grad, self._device, item.data.dtype)
            moved = self.copies.copy_tensor(item.detach())
            is_parameter = isinstance(item, torch.nn.Parameter)
            return torch.nn.Parameter(moved, item.requires_grad) if is_parameter else moved.requires_grad_()
        if is_collection(kind):
            if all(self._is_placed(value) for value in list_memories(item) if isinstance(value, torch.Tensor)):
                return item
            moved = item.apply(self._move_leaf, filter_empty=False, device=None, propagate_lock=True)
            return moved.to(self._device)  # This sets the collection's device; the tensors are already moved.
        if isinstance(item, torch.nn.Module):
            tensors_held = [*item.parameters(), *item.buffers()]
        else:
            optimizer = item if isinstance(item, torch.optim.Optimizer) else item.optimizer
            states = (value for state in optimizer.state.values() for name, value in state.items() if name != "step")
            tensors_held = [value for group in optimizer.param_groups for value in group["params"]]
            tensors_held += [value for value in states if isinstance(value, torch.Tensor)]
        if all(map(self._is_placed, tensors_held)):
            return item
        # Copy the model or optimizer, because other code may still use the original.
        self._memo.update({id(tensor): self._move_leaf(tensor) for tensor in tensors_held})
        return copy.deepcopy(item, self._memo)

    def _is_placed(self, tensor: Any) -> bool:
        is_placed: bool = tensor.device == self._device or tensor.is_meta  # Meta tensors have no contents to move.
        return is_placed


@by_type
def _is_whole(kind: type) -> bool:
    """Return whether a type is a tensor, tensor collection, model or optimizer, which are moved as a whole."""
    torch = find_imported("torch")
    wholes = torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
    return is_collection(kind) or issubclass(kind, wholes)


@by_type
def _may_hold_tensors(kind: type) -> bool:
    return _is_whole(kind) or is_record(kind)


def detach_value(value: Any, is_lent: Callable[[Any], bool] = lambda tensor: False) -> Any:
    """Return a value with tensors detached from autograd, and with copies in place of inference tensors.

    Tensors in records are included, if the records can be copied and aren't nested too deeply. Parameters of a model or
    optimizer in the value stay parameters. The result shares memory with the value, except for clones: inference
    tensors, which only a copy can make ordinary, and tensors that `is_lent` reports, because others write into them
    unnoticed by torch.
    """
    return value if isinstance(value, _PLAIN) else _Detacher(is_lent).convert_value(value)


def hand_over_value(value: Any) -> Any:
    """Convert an argument for a method in the same process like `detach_value`, but keep leaf tensors of autograd."""
    return _Detacher(lambda tensor: False, keeps_leaves=True).convert_value(value)


def copy_value(value: Any) -> Any:
    """Copy a value with all containers, tensors and arrays, because the owner may overwrite the original memory.

    Copied tensors are detached from autograd, with memory for their own elements only. A model's parameters stay
    parameters.
    """
    if is_plain(value):
        return [*value] if type(value) is list else value
    torch = find_imported("torch")
    parts = [] if torch is None else [item for item in list_memories(value) if isinstance(item, torch.Tensor)]
    # `copy.deepcopy` alone would copy the whole storage of a view, and would refuse tensors of an autograd graph.
    clones = {id(item): item.detach().clone() for item in parts if not is_trained(item)}
    return copy.deepcopy(value, clones)


class _Detacher:
    """Converts the tensors of values, as described at `detach_value`."""

    def __init__(self, is_lent: Callable[[Any], bool], keeps_leaves: bool = False) -> None:
        self._is_lent = is_lent
        self._keeps_leaves = keeps_leaves  # True keeps all leaf tensors of autograd.
        self._value: Any = None
        # Caches the ids of all parameters of models and optimizers in the value.
        self._trained: set[int] | None = None
        self._torch = find_imported("torch")
        self._records = Records()
        self._is_inside = False

    def convert_value(self, value: Any) -> Any:
        self._value = value
        # The value is walked even without torch, to detect a value that contains itself.
        return map_leaves(value, self._convert_leaf, _may_have_memory)

    def _convert_leaf(self, item: Any) -> Any:
        torch = self._torch
        if torch is None:
            return item
        if isinstance(item, torch.Tensor):
            if self._is_copied(item):
                with torch.inference_mode(False), torch.no_grad():
                    return item.clone()
            return item.detach() if self._is_detached(item) and not self._keeps_gradients(item) else item
        kind: type = type(item)
        if is_collection(kind):
            members = (
                [tensor for tensor in list_memories(item) if isinstance(tensor, torch.Tensor)]
                if self._is_inside
                else []
            )
            if self._is_inside and not any(self._is_detached(tensor) or self._is_copied(tensor) for tensor in members):
                return item
            return item.apply(self._convert_leaf, filter_empty=False)
        if not is_record(kind) or isinstance(item, torch.nn.Module):
            return item
        if are_plain(_list_contents(item)):
            return item
        is_inside, self._is_inside = self._is_inside, True
        try:
            # This needs one stack frame less per nested record than `self.convert_value`.
            return self._records.rebuild_record(
                item, functools.partial(map_leaves, leaf=self._convert_leaf, matters=_may_have_memory)
            )
        except CopyError:
            return item
        except RecursionError:  # The outermost record stays unchanged if nested too deeply.
            if is_inside:
                raise
            return item
        finally:
            self._is_inside = is_inside

    def _is_copied(self, tensor: Any) -> bool:
        # Only inference tensors lack a version. `is_inference()` alone is slow, because of releasing the GIL.
        try:
            tensor._version  # noqa: B018 - it is asked for, that is all
        except RuntimeError:
            if tensor.is_inference():
                return True
        return self._is_lent(tensor)

    def _is_detached(self, tensor: Any) -> bool:
        return tensor.requires_grad or isinstance(tensor, self._torch.nn.Parameter)

    def _keeps_gradients(self, tensor: Any) -> bool:
        """Return whether a tensor stays a leaf of autograd, such as a parameter of a model in the value."""
        torch = self._torch
        if self._trained is None:
            trained = self._trained = set[int]()

            def note(trainer: Any) -> Any:
                model = isinstance(trainer, torch.nn.Module)
                groups = [trainer.parameters()] if model else [group["params"] for group in trainer.param_groups]
                trained.update(id(parameter) for group in groups for parameter in group)
                return trainer

            map_leaves(self._value, note, lambda kind: issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)))
        return tensor.is_leaf and (self._keeps_leaves or id(tensor) in self._trained)


class Watch:
    """Detects writes into the tensors and arrays of a value.

    Version counters show all writes by torch's operators, at no cost. Writes by NumPy, by `.data` or by a detached
    alias with other counters show in the contents only, which must be read in full.

    Attributes:
        nbytes: Bytes of all tensors and arrays.
    """

    __slots__ = ("_contents", "_seen", "_tensors", "nbytes")

    def __init__(self, value: Any, contents: bool) -> None:
        items = list_memories(value)
        torch = find_imported("torch")
        self.nbytes = sum(map(_count_bytes, items))
        self._tensors = [] if torch is None else [item for item in items if isinstance(item, torch.Tensor)]
        self._contents = (value,) if contents else ()
        self._seen = self._read_state()

    def was_written(self) -> bool:
        """Return whether anything was written since the last call of this method, or since the creation."""
        before, self._seen = self._seen, self._read_state()
        return before != self._seen

    def was_touched(self) -> bool:
        """Return whether torch's operators have written since the last call of `was_written`. Safe on any thread."""
        versions, _ = self._seen
        return versions != self._read_versions()

    def _read_state(self) -> tuple[list[int], bytes]:
        digest = hashlib.blake2b(digest_size=16)
        for value in self._contents:
            _update_digest(digest, value, {})
        return self._read_versions(), digest.digest()

    def _read_versions(self) -> list[int]:
        return [*map(get_version, self._tensors)]


def get_version(tensor: Any) -> int:
    """Return the number of writes into a tensor by torch's operators; 0 for inference tensors, which aren't counted."""
    # `is_inference()` isn't called, because it releases the GIL, which is slow among busy threads.
    try:
        return tensor._version  # type: ignore[no-any-return]
    except RuntimeError:
        return 0


def _update_digest(digest: hashlib.blake2b, value: Any, looked_at: dict[int, Any]) -> None:
    """Add a value's structure, the contents of tensors and arrays, and numbers and strings to a digest.

    Records are included; attributes of other objects aren't.
    """
    kind: Any = type(value)
    if isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for key, item in value.items():
            _update_digest(digest, key, looked_at)
            _update_digest(digest, item, looked_at)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        digest.update(b"[%d" % len(value))
        for item in value:
            _update_digest(digest, item, looked_at)
    elif isinstance(value, _COMPARED):
        digest.update(f"{value!r},".encode(errors="surrogatepass"))
    elif has_memory(kind):
        for item in list_memories(value):
            _update_digest_memory(digest, item)
    elif is_record(kind) and id(value) not in looked_at:
        looked_at[id(value)] = value  # Records may form cycles.
        for part in _list_contents(value):
            _update_digest(digest, part, looked_at)


def _update_digest_memory(digest: hashlib.blake2b, item: Any) -> None:
    torch, numpy = find_imported("torch"), find_imported("numpy")
    if torch is not None and isinstance(item, torch.Tensor):
        dense = item.values() if item.is_nested else item
        if (parts := sparse_parts(dense)) is not None:
            for part in parts:
                _update_digest_memory(digest, part)
            return
        if dense.layout is not torch.strided or dense.is_meta:  # Only version counters show writes into these tensors.
            return
        dense = dense.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(expose_buffer(view_bytes(dense)))
    elif numpy is not None and isinstance(item, numpy.ndarray) and item.dtype != object:
        digest.update(numpy.ascontiguousarray(item).tobytes())


def list_memories(value: Any) -> list[Any]:
    """Return the tensors and arrays in a value, including the contents of records, in order."""
    result: list[Any] = []
    map_leaves(value, functools.partial(_collect_memory, result, {}), _may_have_memory)
    return result


def _collect_memory(found: list[Any], looked_at: dict[int, Any], item: Any) -> Any:
    # This is no closure, because a closure that refers to itself would keep results alive until a garbage collection.
    kind: type = type(item)
    if is_collection(kind):
        item.apply(functools.partial(_collect_memory, found, looked_at), filter_empty=False)
    elif has_memory(kind):
        found.append(item)
    elif id(item) not in looked_at:
        looked_at[id(item)] = item  # Records may form cycles.
        inside = _list_contents(item)
        for part in () if are_plain(inside) else inside:
            map_leaves(part, functools.partial(_collect_memory, found, looked_at), _may_have_memory)
    return item


@by_type
def _may_have_memory(kind: type) -> bool:
    return has_memory(kind) or is_record(kind)


@by_type
def has_memory(kind: type) -> bool:
    """Return whether values of a type are tensors, arrays or collections of tensors."""
    return structure_of(kind) is None and (hasattr(kind, "nbytes") or is_collection(kind))


def list_tensors(value: Any) -> list[Any]:
    """Return the tensors in a value that have a storage, including the values of jagged tensors."""
    torch = find_imported("torch")
    if torch is None:
        return []
    candidates = [item for item in list_memories(value) if isinstance(item, torch.Tensor)]
    candidates = [item.values() if item.layout is torch.jagged else item for item in candidates]
    return [item for item in candidates if item.layout is torch.strided and not item.is_nested]


def sparse_parts(item: Any) -> list[Any] | None:
    """Return the parts of a sparse tensor, or None for other tensors."""
    layout = str(getattr(item, "layout", ""))
    if layout == "torch.sparse_coo":
        return [item._indices(), item._values()]
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [item.crow_indices(), item.col_indices(), item.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [item.ccol_indices(), item.row_indices(), item.values()]
    return None


def _count_bytes(item: Any) -> int:
    if (parts := sparse_parts(item)) is not None:
        return sum(map(_count_bytes, parts))
    size = item.nbytes
    return size if isinstance(size, int) else 0  # The size of a jagged tensor is symbolic.


def count_tensor_bytes(value: Any) -> int:
    """Count the bytes of the tensors and arrays in a value."""
    return sum(map(_count_bytes, list_memories(value)))


def describe_value(value: Any) -> Any:
    """Return the structure of a value with shapes and dtypes instead of contents, as plain data.

    A value of a type in `register_batch` is a dict from the type's name to the leaves.
    """

    def leaf(item: Any) -> Any:
        kind: type = type(item)
        if (structure := structure_of(kind)) is not None:
            return {kind.__name__: describe_value(structure.open_value(item))}
        if not (has_memory(kind) and hasattr(kind, "dtype")):  # Only attributes of tensors and arrays are read.
            return kind.__name__
        has_shape = not getattr(item, "is_nested", False) or str(item.layout) == "torch.jagged"
        shape = [*getattr(item, "shape", ())] if has_shape else "[nested]"
        return f"{kind.__name__}{shape} {str(item.dtype).removeprefix('torch.')}"

    if isinstance(value, list) and len(value) > 8 and not has_memory(type(value[0])):
        return f"list[{len(value)}] of {type(value[0]).__name__}"
    return map_leaves(value, leaf)
