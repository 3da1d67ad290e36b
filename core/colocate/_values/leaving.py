"""What becomes of a value when it leaves a role method, and how a write in place is noticed."""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

from colocate._devices.device_copies import exposed, flat
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate._values.leaves import is_collection
from colocate._values.records import CopyError, Records, fields
from colocate._values.tree import PLAIN, map_leaves

_PLAIN = (int, float, str, type(None))
_COMPARED = (*_PLAIN, complex, bytes, bytearray)


def ordinary(value: Any, is_lent: Callable[[Any], bool] = lambda tensor: False) -> Any:
    """The value with its tensors detached from autograd, and inference tensors as ordinary ones.

    Those in its dataclasses and classes made by attrs are among them, where these can be copied and the value isn't
    nested too deep. Parameters of a model or an optimizer that is in the value stay what they are to that.
    Shares memory with the value; only an inference tensor is cloned, since nothing but a copy can make it ordinary, and
    one that others will write into without torch's noticing.

    Args:
        value: The value.
        is_lent: Whether a tensor is such a one.
    """
    if isinstance(value, _PLAIN):
        return value
    return _Ordinary(is_lent).value(value)


def handed_over(value: Any) -> Any:
    """An argument as a method gets it within one process: as `ordinary` has it, but parameters stay parameters."""
    return value if isinstance(value, _PLAIN) else _Ordinary(lambda tensor: False, keeps_leaves=True).value(value)


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
        """What becomes of a value."""
        self._value = value
        return map_leaves(value, self._leaf, _may_have_memory)

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
            is_as_it_is = self._is_inside and not self._has_changes(item)
            return item if is_as_it_is else item.apply(self._leaf, filter_empty=False)
        if not fields(kind) or isinstance(item, torch.nn.Module):
            return item
        if PLAIN.issuperset([type(getattr(item, name, None)) for name in fields(kind)]):
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
        return _is_inference(tensor) or self._is_lent(tensor)

    def _is_detached(self, tensor: Any) -> bool:
        return tensor.requires_grad or isinstance(tensor, self._torch.nn.Parameter)

    def _stays(self, tensor: Any) -> bool:
        """Whether a tensor is to stay what gradients are computed of: the value has a model or optimizer of it."""
        if self._trained is None:
            self._trained = set()
            map_leaves(self._value, self._note, self._is_trainer)
        return tensor.is_leaf and (self._keeps_leaves or id(tensor) in self._trained)

    def _is_trainer(self, kind: type) -> bool:
        return issubclass(kind, (self._torch.nn.Module, self._torch.optim.Optimizer))

    def _note(self, trainer: Any) -> Any:
        """Note the parameters of a model or an optimizer."""
        model = isinstance(trainer, self._torch.nn.Module)
        groups = [trainer.parameters()] if model else [group["params"] for group in trainer.param_groups]
        assert self._trained is not None
        self._trained.update(id(parameter) for group in groups for parameter in group)
        return trainer

    def _has_changes(self, value: Any) -> bool:
        found = [item for item in memories(value) if isinstance(item, self._torch.Tensor)]
        return any(self._is_detached(item) or self._is_copied(item) for item in found)


def _is_inference(tensor: Any) -> bool:
    # `is_inference()` lets go of the interpreter's lock, which takes long to come back where other threads want it too.
    # Such tensors, and no others, have no version.
    try:
        tensor._version  # noqa: B018 - it is asked for, that is all
    except RuntimeError:
        return bool(tensor.is_inference())
    return False


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

    def _state(self) -> tuple[list[int], list[bytes]]:
        return [tensor._version for tensor in self._tensors], [_digest(value) for value in self._contents]


def _digest(value: Any) -> bytes:
    """A digest of a value's structure, of the contents of its tensors and arrays, and of its numbers and strings.

    Those in its dataclasses and classes made by attrs are among them; what other objects have as attributes isn't.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, value, {})
    return digest.digest()


def _add(digest: hashlib.blake2b, value: Any, looked_at: dict[int, Any]) -> None:
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
    elif (names := fields(kind)) and id(value) not in looked_at:
        looked_at[id(value)] = value  # it may lead to itself
        for name in names:
            _add(digest, getattr(value, name, None), looked_at)


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
    """The tensors and arrays in a value, in order, those in its dataclasses and classes made by attrs among them."""
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
        for name in fields(kind):
            map_leaves(getattr(item, name, None), functools.partial(_find, found, looked_at), _may_have_memory)
    return item


@by_type
def _may_have_memory(kind: type) -> bool:
    return has_memory(kind) or bool(fields(kind))


@by_type
def has_memory(kind: type) -> bool:
    """Whether values of this type are tensors, arrays or collections of tensors."""
    return hasattr(kind, "nbytes") or is_collection(kind)


def tensors(value: Any) -> list[Any]:
    """The tensors in a value that have a storage, those of jagged ones among them."""
    torch = imported("torch")
    if torch is None:
        return []
    found = [item for item in memories(value) if isinstance(item, torch.Tensor)]
    found = [item.values() if item.layout is torch.jagged else item for item in found]
    return [item for item in found if item.layout is torch.strided and not item.is_nested]


def sparse_parts(item: Any) -> list[Any] | None:
    """What a sparse tensor consists of, None of any other."""
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
    """Bytes of the tensors and arrays in a value (0 when there are none)."""
    return sum(map(_nbytes, memories(value)))


def _shape(item: Any) -> list[Any] | str:
    torch = imported("torch")
    if torch is not None and isinstance(item, torch.Tensor) and item.is_nested and item.layout is torch.strided:
        return "[nested]"  # which has none
    return [*getattr(item, "shape", ())]


def describe(value: Any) -> Any:
    """The structure of a value with shapes and dtypes instead of contents, as plain data."""

    def leaf(item: Any) -> Any:
        kind: type = type(item)
        if not (has_memory(kind) and hasattr(kind, "dtype")):  # no other value is asked for its attributes
            return kind.__name__
        return f"{kind.__name__}{_shape(item)} {str(item.dtype).removeprefix('torch.')}"

    if isinstance(value, list) and len(value) > 8 and not has_memory(type(value[0])):
        return f"list[{len(value)}] of {type(value[0]).__name__}"
    return map_leaves(value, leaf)
