"""What becomes of the tensors in a value, as a method gets it and as it leaves one; how a write in place is noticed.

A method finds its tensors on its slot's device, whatever made them. What it returns has no graph of autograd's. Tensors
in records, values of users' classes that have others as attributes, are among them.
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
from colocate._devices.copies import Copies, exposed, flat
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate._system.jobs import error_text
from colocate._values.kinds import is_collection
from colocate._values.leaves import map_leaves
from colocate._values.plain import are_plain, is_plain
from colocate.errors import DispatchError

_PLAIN = (int, float, str, type(None))
_COMPARED = (*_PLAIN, complex, bytes, bytearray)


@by_type
def fields(kind: type) -> tuple[str, ...]:
    """Return the attributes in which a record has its values; none of other types.

    Records are dataclasses, classes made by attrs, and `UserDict`.
    """
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, UserDict):
        return ("data",)
    return tuple(field.name for field in attrs.fields(kind)) if attrs.has(kind) else ()


@by_type
def is_record(kind: type) -> bool:
    """Whether values of a type are opened: records, and those that `register_batch` was told the leaves of."""
    return structure_of(kind) is not None or bool(fields(kind))


def _inside(item: Any) -> list[Any]:
    """Return what lies in a value that is opened."""
    kind: type = type(item)
    if (structure := structure_of(kind)) is not None:
        return [structure.open(item)]
    return [getattr(item, name, None) for name in fields(kind)]


@by_type
def slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Return a type's slots, also private ones and those that a base has under the same name."""
    members = (member for base in kind.__mro__ if base is not object for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


class CopyError(Exception):
    """A record can't be copied, or the copy not be given other values."""


class Records:
    """Makes records anew in which something changes; no record itself is changed.

    Each once, so that two names of one stay two names of one; one that leads to itself does so again. Who uses them is
    no part of them: that would be a circle, which holds what was made until the garbage collector comes.
    """

    def __init__(self, by_itself: Callable[[Any], Any] | None = None) -> None:
        """Args: by_itself: Copies one in its own way, with code of its class; None: none of that is run."""
        self._by_itself = by_itself
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of; None while nothing else is needed
        self._inside: list[int] | None = None  # the outermost one's, and of all in it; None between two
        self._leads_back = self._copies_back = False

    def of(self, item: Any, change: Callable[[Any], Any]) -> Any:
        """Return what a record becomes: itself where nothing in it changes; a `CopyError` if it can't be copied.

        `change` says what becomes of a field's value, the very object where nothing does; it comes back here for those
        in it.
        """
        known, made = self._made.get(id(item), (None, None))
        if made is not None:
            return made
        if known is not None:  # it leads to itself
            self._leads_back = True
            if not self._copies_back:
                return item
            if structure_of(type(item)) is not None:
                raise CopyError("it is one of its own leaves")
            made = self._copy(item)
            self._made[id(item)] = item, made
            return made
        if self._inside is None:
            return self._outermost(item, change)
        self._inside.append(id(item))
        self._made[id(item)] = item, None
        made = item
        try:  # without another frame: records may be nested deep
            if (structure := structure_of(type(item))) is not None:
                leaves = structure.open(item)
                if (new := change(leaves)) is not leaves:
                    made = structure.make(type(item), new)
                return made
            changed = {}
            for name in fields(type(item)):
                old = getattr(item, name, None)
                if (new := change(old)) is not old:
                    changed[name] = new
            copied = self._made[id(item)][1]
            if changed and copied is None:
                copied = self._copy(item)
            for name, new in changed.items():
                try:
                    object.__setattr__(copied, name, new)  # it may be frozen
                except AttributeError as error:
                    raise CopyError(f"{name} can't be set") from error
            made = item if copied is None else copied
        finally:
            self._made[id(item)] = item, made
        return made

    def _outermost(self, item: Any, change: Callable[[Any], Any]) -> Any:
        self._inside, self._leads_back, self._copies_back = [], False, False
        try:
            made = self.of(item, change)
            if self._leads_back and made is not item:  # all of it once more: what leads back leads to copies now
                for key in self._inside:
                    del self._made[key]
                self._inside, self._copies_back = [], True
                made = self.of(item, change)
            return made
        finally:
            self._inside = None

    def _copy(self, item: Any) -> Any:
        if self._by_itself is not None:
            try:
                made = self._by_itself(item)
            except Exception as error:
                raise CopyError(error_text(error)) from error
            if made is not item:
                return made
        kind = type(item)
        try:
            made = object.__new__(kind)
            if kind.__dictoffset__:
                vars(made).update(vars(item))
            for member in slots(kind):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    member.__set__(made, member.__get__(item))
        except (AttributeError, TypeError) as error:  # it is of a type that is made otherwise
            raise CopyError(str(error)) from error
        return made


def placed(arguments: dict[str, Any], device: str, host: Collection[str] = ()) -> dict[str, Any]:
    """Return a method's arguments with their tensors on a device, but for those of parameters on the `host`.

    What is there already is the very object that it was.
    """
    torch = imported("torch")
    if torch is None:
        return arguments
    there, here = _Moves(torch, device), _Moves(torch, "cpu")
    try:
        return {name: (here if name in host else there).value(value) for name, value in arguments.items()}
    finally:
        there.copies.wait()


def on_device(value: Any, device: str) -> Any:
    """Return a value with its tensors on a device."""
    return placed({"": value}, device)[""]


def on_one_device(values: Sequence[Any]) -> Sequence[Any]:
    """Return values with their tensors on the device of the first one."""
    first = next(iter(tensors(values[0])), None)
    return values if first is None else [on_device(value, str(first.device)) for value in values]


class _Moves:
    """Moves values to one device: each tensor once, so that two names of one stay two names of one.

    So a model that is moved and its optimizer have the same parameters there.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        self.copies = Copies(self._device)
        self._records = Records(copy.copy)
        self._moved: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of: an id may be used again
        self._memo: dict[int, Any] = {}  # the same for `copy.deepcopy`

    def value(self, value: Any) -> Any:
        return map_leaves(value, self._leaf, _may_hold_tensors)

    def _leaf(self, item: Any) -> Any:
        kind: type = type(item)
        if not _may_hold_tensors(kind):
            return item
        if _is_whole(kind):
            known = self._moved.get(id(item))
            if known is None:
                known = self._moved[id(item)] = item, self._moved_leaf(item, kind)
            return known[1]
        try:
            # `self.value` with a frame less for each record within another one: they may be nested deep.
            return self._records.of(item, functools.partial(map_leaves, leaf=self._leaf, matters=_may_hold_tensors))
        except CopyError as error:
            raise DispatchError(
                f"an argument has a {kind.__qualname__} with tensors that aren't on {self._device}, and it can't "
                f"be copied ({error}): give its tensors by themselves, or name the parameter in @method(host=...) and "
                "move them in the method"
            ) from error

    def _moved_leaf(self, item: Any, kind: type) -> Any:
        torch = self._torch
        if isinstance(item, torch.Tensor):
            if self._is_there(item):
                return item
            if not is_trained(item):
                return self.copies.of(item)
            if isinstance(item, torch.nn.parameter.UninitializedTensorMixin):
                return type(item)(item.requires_grad, self._device, item.data.dtype)
            moved = self.copies.of(item.detach())
            is_parameter = isinstance(item, torch.nn.Parameter)
            return torch.nn.Parameter(moved, item.requires_grad) if is_parameter else moved.requires_grad_()
        if is_collection(kind):
            if all(self._is_there(each) for each in memories(item) if isinstance(each, torch.Tensor)):
                return item
            moved = item.apply(self._leaf, filter_empty=False, device=None, propagate_lock=True)
            return moved.to(self._device)  # which is there: it only has to say so
        if isinstance(item, torch.nn.Module):
            held = [*item.parameters(), *item.buffers()]
        else:
            optimizer = item if isinstance(item, torch.optim.Optimizer) else item.optimizer
            states = (each for state in optimizer.state.values() for name, each in state.items() if name != "step")
            held = [each for group in optimizer.param_groups for each in group["params"]]
            held += [each for each in states if isinstance(each, torch.Tensor)]
        if all(map(self._is_there, held)):
            return item
        # A copy on the device: the thing itself may be somebody's who uses it where it is.
        self._memo.update({id(tensor): self._leaf(tensor) for tensor in held})
        return copy.deepcopy(item, self._memo)

    def _is_there(self, tensor: Any) -> bool:
        there: bool = tensor.device == self._device or tensor.is_meta  # which has no contents to be moved
        return there


@by_type
def _is_whole(kind: type) -> bool:
    """Whether values of this type are moved as a whole: tensors, collections of them, and what has parameters."""
    torch = imported("torch")
    wholes = torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
    return is_collection(kind) or issubclass(kind, wholes)


@by_type
def _may_hold_tensors(kind: type) -> bool:
    return _is_whole(kind) or is_record(kind)


def ordinary(value: Any, is_lent: Callable[[Any], bool] = lambda tensor: False) -> Any:
    """Return the value with its tensors detached from autograd, and inference tensors as ordinary ones.

    Those in its records are among them, where these can be copied and the value isn't nested too deep. Parameters of a
    model or an optimizer that is in the value stay what they are to that. It shares memory with the value; only an
    inference tensor is cloned, since nothing but a copy can make it ordinary, and one that `is_lent`, into which others
    will write without torch's noticing.
    """
    return value if isinstance(value, _PLAIN) else _Ordinary(is_lent).value(value)


def handed_over(value: Any) -> Any:
    """Return an argument as a method gets it within one process: ordinary, but parameters stay parameters."""
    return _Ordinary(lambda tensor: False, keeps_leaves=True).value(value)


def copy_of(value: Any) -> Any:
    """Copy a value with all containers, tensors and arrays: the owner may write to the same memory next.

    Tensors come out detached from autograd, each with memory for its own elements alone. A model's parameters stay
    parameters.
    """
    if is_plain(value):
        return [*value] if type(value) is list else value
    torch = imported("torch")
    parts = [] if torch is None else [item for item in memories(value) if isinstance(item, torch.Tensor)]
    # `copy.deepcopy` alone copies the whole storage of a view, and refuses tensors of an autograd graph.
    clones = {id(item): item.detach().clone() for item in parts if not is_trained(item)}
    return copy.deepcopy(value, clones)


class _Ordinary:
    """Makes values ordinary."""

    def __init__(self, is_lent: Callable[[Any], bool], keeps_leaves: bool = False) -> None:
        self._is_lent = is_lent
        self._keeps_leaves = keeps_leaves  # whatever gradients are computed of stays so
        self._value: Any = None
        self._trained: set[int] | None = None  # by id(), the parameters of models and optimizers in the value
        self._torch = imported("torch")
        self._records = Records()
        self._is_inside = False

    def value(self, value: Any) -> Any:
        """Return what becomes of a value."""
        self._value = value
        return map_leaves(value, self._leaf, _may_have_memory)  # also without torch: so what has no end is found

    def _leaf(self, item: Any) -> Any:
        torch = self._torch
        if torch is None:
            return item
        if isinstance(item, torch.Tensor):
            if self._is_copied(item):
                with torch.inference_mode(False), torch.no_grad():
                    return item.clone()
            return item.detach() if self._is_detached(item) and not self._stays(item) else item
        kind: type = type(item)
        if is_collection(kind):
            found = [each for each in memories(item) if isinstance(each, torch.Tensor)] if self._is_inside else []
            if self._is_inside and not any(self._is_detached(each) or self._is_copied(each) for each in found):
                return item
            return item.apply(self._leaf, filter_empty=False)
        if not is_record(kind) or isinstance(item, torch.nn.Module):
            return item
        if are_plain(_inside(item)):
            return item
        is_inside, self._is_inside = self._is_inside, True
        try:
            # `self.value` with a frame less for each record within another one: they may be nested deep.
            return self._records.of(item, functools.partial(map_leaves, leaf=self._leaf, matters=_may_have_memory))
        except CopyError:
            return item
        except RecursionError:  # too deep: all of it stays as it is
            if is_inside:
                raise
            return item
        finally:
            self._is_inside = is_inside

    def _is_copied(self, tensor: Any) -> bool:
        # `is_inference()` lets go of the interpreter's lock, which takes long to come back where other threads want it
        # too. Such tensors, and no others, have no version.
        try:
            tensor._version  # noqa: B018 - it is asked for, that is all
        except RuntimeError:
            if tensor.is_inference():
                return True
        return self._is_lent(tensor)

    def _is_detached(self, tensor: Any) -> bool:
        return tensor.requires_grad or isinstance(tensor, self._torch.nn.Parameter)

    def _stays(self, tensor: Any) -> bool:
        """Whether a tensor is to stay what gradients are computed of: the value has a model or optimizer of it."""
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
    """Notices writes into the tensors and arrays of a value.

    Version counters see every write through torch's operators, at no cost; writes through NumPy, `.data` or a
    detached alias of other counters are seen in the contents only, which takes reading all of it.

    Attributes:
        nbytes: How many bytes they are.
    """

    __slots__ = ("_contents", "_seen", "_tensors", "nbytes")

    def __init__(self, value: Any, contents: bool) -> None:
        found = memories(value)
        torch = imported("torch")
        self.nbytes = sum(map(_nbytes, found))
        self._tensors = [] if torch is None else [item for item in found if isinstance(item, torch.Tensor)]
        self._contents = (value,) if contents else ()
        self._seen = self._state()

    def written(self) -> bool:
        """Whether somebody has written into them since this was last asked, or since they were made."""
        before, self._seen = self._seen, self._state()
        return before != self._seen

    def touched(self) -> bool:
        """Whether torch's operators have written since then. This may be asked on any thread, and changes nothing."""
        versions, _ = self._seen
        return versions != self._versions()

    def _state(self) -> tuple[list[int], bytes]:
        digest = hashlib.blake2b(digest_size=16)
        for value in self._contents:
            _add(digest, value, {})
        return self._versions(), digest.digest()

    def _versions(self) -> list[int]:
        return [*map(version, self._tensors)]


def version(tensor: Any) -> int:
    """Return how often torch's operators have written into a tensor; 0 for an inference tensor, which has no count."""
    # `is_inference()` lets go of the interpreter's lock, which takes long to come back where other threads want it too.
    try:
        return tensor._version  # type: ignore[no-any-return]
    except RuntimeError:
        return 0


def _add(digest: hashlib.blake2b, value: Any, looked_at: dict[int, Any]) -> None:
    """Add a value's structure, the contents of its tensors and arrays, and its numbers and strings.

    Those in its records are among them; what other objects have as attributes isn't.
    """
    kind: Any = type(value)
    if isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for key, item in value.items():
            _add(digest, key, looked_at)
            _add(digest, item, looked_at)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        digest.update(b"[%d" % len(value))
        for item in value:
            _add(digest, item, looked_at)
    elif isinstance(value, _COMPARED):
        digest.update(f"{value!r},".encode(errors="surrogatepass"))
    elif has_memory(kind):
        for item in memories(value):
            _add_memory(digest, item)
    elif is_record(kind) and id(value) not in looked_at:
        looked_at[id(value)] = value  # it may lead to itself
        for part in _inside(value):
            _add(digest, part, looked_at)


def _add_memory(digest: hashlib.blake2b, item: Any) -> None:
    torch, numpy = imported("torch"), imported("numpy")
    if torch is not None and isinstance(item, torch.Tensor):
        dense = item.values() if item.is_nested else item
        if (parts := sparse_parts(dense)) is not None:
            for part in parts:
                _add_memory(digest, part)
            return
        if dense.layout is not torch.strided or dense.is_meta:  # its version has to do
            return
        dense = dense.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(exposed(flat(dense)))
    elif numpy is not None and isinstance(item, numpy.ndarray) and item.dtype != object:
        digest.update(numpy.ascontiguousarray(item).tobytes())


def memories(value: Any) -> list[Any]:
    """Return the tensors and arrays in a value, in order, those in its records among them."""
    found: list[Any] = []
    map_leaves(value, functools.partial(_find, found, {}), _may_have_memory)
    return found


def _find(found: list[Any], looked_at: dict[int, Any], item: Any) -> Any:
    # No function that refers to itself by its closure: that would be a circle, which holds what was found until the
    # garbage collector comes.
    kind: type = type(item)
    if is_collection(kind):
        item.apply(functools.partial(_find, found, looked_at), filter_empty=False)
    elif has_memory(kind):
        found.append(item)
    elif id(item) not in looked_at:
        looked_at[id(item)] = item  # it may lead to itself
        inside = _inside(item)
        for part in () if are_plain(inside) else inside:
            map_leaves(part, functools.partial(_find, found, looked_at), _may_have_memory)
    return item


@by_type
def _may_have_memory(kind: type) -> bool:
    return has_memory(kind) or is_record(kind)


@by_type
def has_memory(kind: type) -> bool:
    """Whether values of this type are tensors, arrays or collections of tensors."""
    return structure_of(kind) is None and (hasattr(kind, "nbytes") or is_collection(kind))


def tensors(value: Any) -> list[Any]:
    """Return the tensors in a value that have a storage, those of jagged ones among them."""
    torch = imported("torch")
    if torch is None:
        return []
    found = [item for item in memories(value) if isinstance(item, torch.Tensor)]
    found = [item.values() if item.layout is torch.jagged else item for item in found]
    return [item for item in found if item.layout is torch.strided and not item.is_nested]


def sparse_parts(item: Any) -> list[Any] | None:
    """Return what a sparse tensor consists of, None of any other."""
    layout = str(getattr(item, "layout", ""))
    if layout == "torch.sparse_coo":
        return [item._indices(), item._values()]
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [item.crow_indices(), item.col_indices(), item.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [item.ccol_indices(), item.row_indices(), item.values()]
    return None


def _nbytes(item: Any) -> int:
    if (parts := sparse_parts(item)) is not None:
        return sum(map(_nbytes, parts))
    size = item.nbytes
    return size if isinstance(size, int) else 0  # a jagged tensor's is a symbol


def tensor_bytes(value: Any) -> int:
    """Count the bytes of the tensors and arrays in a value (0 when there are none)."""
    return sum(map(_nbytes, memories(value)))


def describe(value: Any) -> Any:
    """Return the structure of a value with shapes and dtypes instead of contents, as plain data.

    A value that has leaves is a dict of its type's name and these.
    """

    def leaf(item: Any) -> Any:
        kind: type = type(item)
        if (structure := structure_of(kind)) is not None:
            return {kind.__name__: describe(structure.open(item))}
        if not (has_memory(kind) and hasattr(kind, "dtype")):  # no other value is asked for its attributes
            return kind.__name__
        has_shape = not getattr(item, "is_nested", False) or str(item.layout) == "torch.jagged"
        shape = [*getattr(item, "shape", ())] if has_shape else "[nested]"
        return f"{kind.__name__}{shape} {str(item.dtype).removeprefix('torch.')}"

    if isinstance(value, list) and len(value) > 8 and not has_memory(type(value[0])):
        return f"list[{len(value)}] of {type(value[0]).__name__}"
    return map_leaves(value, leaf)
