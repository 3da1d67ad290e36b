"""Convert values to bytes and back by pickle protocol 5, with tensors and arrays in separate, uncopied buffers.

`pack` refers to large memory in place (`Packed.buffers`); the transport of a `Packed` decides when to copy. `unpack`
builds tensors and arrays directly on the received memory.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from colocate._definitions import making
from colocate._definitions.ids import get_id
from colocate._definitions.packed import Packed, PlainData
from colocate._definitions.pickler import Pickler, is_special
from colocate._definitions.structure import iter_named, structure_of
from colocate._devices.copies import Copies, expose_buffer, find_line, get_host_copy, view_bytes
from colocate._devices.lending import get_handle
from colocate._signals.guard import interruptible
from colocate._system.by_type import by_type
from colocate.errors import SerializationError

if TYPE_CHECKING:
    import torch

# Smaller tensors are copied into the pickle, because a buffer costs more and keeps the whole message in memory.
_SMALL_BYTES = 2048
_ATOMS = frozenset({type(None), bool, int, float, str})
_PLAIN_ITEMS = 16
# These numbers limit the search for the part of a value that can't be pickled.
_DEPTH = 50
_ITEMS = 10_000

_here = threading.local()  # `_here.copies` has the device copies of a running `unpack` on this thread.


@interruptible
def pack(value: Any) -> Packed:
    """Encode a value without copying the memory of tensors and arrays.

    Tensors computed by autograd are detached. Parameters, and leaves with `requires_grad`, are sent as such, and stay
    one object wherever the value refers to them, so that an optimizer still has the parameters of its model. Device
    tensors are copied to the CPU and marked.

    Args:
        value: A value that cloudpickle can pickle. Classes and functions that other processes can't import are sent by
            id.

    Returns:
        The pickle and the memory that it refers to, which must not change before the transport.

    Raises:
        Exception: Any error of pickling; `explain` finds the culprit.
    """
    if _is_plain(value, _PLAIN_ITEMS) >= 0:
        return Packed(pickle.dumps(value, protocol=5))
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = create_pickler(file, buffers.append)
    pickler.dump(value)
    raw, needs = tuple(buffer.raw() for buffer in buffers), tuple(pickler.needs.values())
    return Packed(file.getvalue(), raw, needs, pickler.has_trained)


def create_pickler(file: Any, buffer_callback: Callable[[Any], Any], bundle: Any = None) -> Pickler:
    # Without torch there are no tensors. `nn` is missing while another thread is importing torch.
    kind = TensorPickler if hasattr(sys.modules.get("torch"), "nn") else Pickler
    return kind(file, buffer_callback, bundle)


@interruptible
def unpack(packed: Packed, device: str | torch.device | None = None) -> Any:
    """Decode a value. Tensors and arrays use the packed memory without a copy."""
    outer = _get_copies()
    if device is None or (device == "cpu" and outer is None):  # All tensors stay in CPU memory.
        return pickle.loads(packed.data, buffers=packed.buffers)
    _here.copies = copies = Copies(device)
    try:
        return pickle.loads(packed.data, buffers=packed.buffers)
    finally:
        _here.copies = outer
        copies.wait_for_copies()


def _get_copies() -> Copies | None:
    return getattr(_here, "copies", None)


def _is_plain(value: Any, room: int) -> int:
    """Return `room` less the number of nested items if all are builtins or `PlainData`; a negative number otherwise."""
    kind = type(value)
    if kind in _ATOMS or issubclass(kind, PlainData):
        return room - 1
    if (kind is not dict and kind is not tuple and kind is not list) or len(value) > room:
        return -1
    for item in (*value, *value.values()) if kind is dict else value:
        room = _is_plain(item, room)
        if room < 0:
            return room
    return room - 1


class TensorPickler(Pickler):
    """A pickler that passes the memory of tensors in separate buffers."""

    def reducer_override(self, obj: Any) -> Any:
        kind: type = type(obj)
        if _is_ordinary(kind):
            return NotImplemented
        torch = sys.modules["torch"]
        if isinstance(obj, torch.Tensor):
            if not is_trained(obj):
                return _reduce_tensor(obj)
            self.has_trained = True
            # Pickle's own reduction is kept, except that the tensor in `data` is reduced like any other tensor.
            parameters = torch.nn.parameter
            make: Any
            args: tuple[Any, ...]
            rest: list[Any] = []
            if issubclass(kind, parameters.UninitializedTensorMixin):
                make, args = functools.partial(kind, dtype=obj.data.dtype), (obj.requires_grad,)
            elif issubclass(kind, parameters.Parameter):
                make, args, *rest = obj.__reduce_ex__(5)
            else:
                make = parameters.Parameter if isinstance(obj, parameters.Parameter) else _requiring_grad
                args = obj.detach(), obj.requires_grad
            if self.bundle is None:
                return make, args, *rest
            # Bundles share parameters by id, because a model and an optimizer may be sent at different times.
            return making.shared, (get_id(obj), make, args), *rest
        if issubclass(kind, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return making.found_at, ("torch.ops", str(obj))
        if _is_tensordict(kind) and obj.device is not None and obj.device.type not in ("cpu", "meta"):
            # The receiver chooses the device, so the sender's device is removed.
            return _placed_tensordict, (obj.clone(recurse=False).clear_device_(),)
        return super().reducer_override(obj)


@by_type
def _is_ordinary(kind: type) -> bool:
    """Return whether values of a type need no special reduction by `TensorPickler` or `Pickler`."""
    torch = sys.modules["torch"]
    ops = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    return not (is_special(kind) or issubclass(kind, (torch.Tensor, *ops)) or _is_tensordict(kind))


def is_trained(tensor: Any) -> bool:
    """Return whether a tensor is a parameter, or a leaf with `requires_grad`."""
    torch = sys.modules["torch"]
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return isinstance(tensor, (torch.nn.Parameter, lazy)) or (tensor.requires_grad and tensor.is_leaf)


def _requiring_grad(tensor: torch.Tensor, requires_grad: bool) -> Any:
    return tensor.requires_grad_(requires_grad)


def _is_tensordict(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("tensordict.base"), "TensorDictBase", ()))


def _placed_tensordict(tensordict: Any) -> Any:
    copies = _get_copies()
    return tensordict.to("cpu" if copies is None else copies.device)


def _reduce_tensor(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    if isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())):
        raise TypeError("this process has only a part of it: send .full_tensor(), or .to_local() for that part alone")
    tensor = tensor.detach()
    # A memory-mapped tensor is sent like a plain tensor, because the subclass only records where the memory is.
    mapped: Any = getattr(sys.modules.get("tensordict"), "MemoryMappedTensor", ())
    if isinstance(tensor, mapped):
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is torch.jagged:
        return _jagged, (tensor.values(), tensor.offsets(), tensor.lengths(), tensor._ragged_idx)
    is_dense = not (tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    if type(tensor) is not torch.Tensor or not is_dense:
        return tensor.__reduce_ex__(5)
    if (line := find_line(tensor)) is not None:
        return _strided, (line, tuple(tensor.shape), tensor.stride())
    marked = _on_device(tensor)
    if marked:
        if (lent := get_handle(tensor)) is not None:
            return lent
        tensor = get_host_copy(tensor)
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    flat_bytes = expose_buffer(view_bytes(tensor))
    memory = pickle.PickleBuffer(flat_bytes) if tensor.nbytes > _SMALL_BYTES else bytearray(flat_bytes)
    return _tensor, (memory, str(tensor.dtype)[6:], tuple(tensor.shape), marked)


def _strided(line: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return line.as_strided(shape, strides)


def _on_device(tensor: Any) -> bool:
    return not tensor.is_cpu


def _tensor(memory: Any, dtype: str, shape: tuple[int, ...], marked: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    # torch.frombuffer refuses empty memory.
    tensor = torch.frombuffer(memory, dtype=kind) if len(memory) else torch.empty(shape, dtype=kind)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    if marked:
        copies = _get_copies()
        return tensor if copies is None else copies.copy_tensor(tensor)
    return tensor


def _jagged(values: Any, offsets: Any, lengths: Any, ragged: int) -> Any:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


# -- where inside a value the thing is that can't be sent


def explain(value: Any, name: str, error: BaseException) -> SerializationError:
    """Return an error that names the deepest part of a value that can't be pickled."""
    path, culprit, cause = find_deepest(value, name, error, pack)
    return SerializationError(
        f"{path} can't be sent: it is {describe_fault(culprit, cause)}. "
        + get_advice(
            culprit,
            "Send plain data and make such a thing where it is needed, inside the role; or leave it out by the "
            "__getstate__ of what holds it.",
        ),
        argument=name,
        path=path,
    )


def find_deepest(
    value: Any, name: str, error: BaseException, pickle: Callable[[Any], object]
) -> tuple[str, Any, BaseException]:
    """Find the deepest part of a value that can't be pickled.

    Args:
        value: The value that failed.
        name: The user's name of the value.
        error: The error.
        pickle: Raises if a part can't be pickled.

    Returns:
        The path in Python syntax, the part, and the part's error.
    """
    path, owner, culprit, cause = name, "", value, error
    visited: set[int] = set()
    while len(visited) < _DEPTH and id(culprit) not in visited:
        visited.add(id(culprit))
        for step, part in islice(_iter_parts(culprit), _ITEMS):  # noqa: B007  # what they are at the break
            try:
                pickle(part)
            except Exception as error:
                cause = error
                break
        else:
            break
        if isinstance(culprit, types.FunctionType) and not step.startswith("."):
            path, owner = step, f" of {culprit.__name__}"
        else:
            path += step
        culprit = part
    return (f"the variable {path}{owner}" if owner else path), culprit, cause


def describe_fault(culprit: Any, cause: BaseException) -> str:
    """Describe the type and the error of a part that can't be pickled."""
    kind = type(culprit)
    article = "an" if kind.__qualname__[:1].lower() in "aeiou" else "a"
    module = _get_module_name(kind)
    module = "colocate" if module.startswith("colocate._") else module  # Users only know the public module.
    return f"{article} {module}.{kind.__qualname__} ({str(cause) or type(cause).__name__})"


def get_advice(culprit: Any, usual: str) -> str:
    if _get_module_name(type(culprit)).partition(".")[0] != "colocate":
        return usual
    return (
        "Pass what the method needs as an argument: a value, or a resident; inside a worker, ctx.sibling(name, cls) "
        "returns another role"
    )


def _get_module_name(kind: type) -> str:
    """Return a class's module, read from `type` itself, because a metaclass may redefine `__module__`."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if isinstance(module, str) else "?"


def _iter_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that pickle would visit, each with a path suffix or the name of a closure variable."""
    if (structure := structure_of(type(value))) is not None:
        yield from iter_named(structure.open_value(value))
        return
    if isinstance(value, dict):
        yield from ((f".keys()[{i}]", key) for i, key in enumerate(value))
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        with suppress(ValueError):  # A closure variable may be unset.
            yield from inspect.getclosurevars(value).nonlocals.items()
            yield ".__defaults__", value.__defaults__
            yield ".__kwdefaults__", value.__kwdefaults__
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, type):
        for name, item in vars(value).items():
            parts = [item]
            if isinstance(item, staticmethod | classmethod):
                parts = [item.__func__]
            elif isinstance(item, property):
                parts = [accessor for accessor in (item.fget, item.fset, item.fdel) if accessor is not None]
            elif isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType):
                parts = []
            yield from ((f".{name}", part) for part in parts)
    if not isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType):
        yield from _iter_state(value)


def _iter_state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and arguments that `__reduce_ex__` returns for an object, each with a path suffix."""
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:
        return  # The object itself is the part that can't be pickled.
    if not isinstance(reduced, tuple) or len(reduced) < 2:
        return
    state = reduced[2] if len(reduced) > 2 else None
    for i, part in enumerate(state if isinstance(state, tuple) else (state,)):
        if isinstance(part, dict):
            yield from ((f".{name}", item) for name, item in part.items())
        else:
            yield f".__reduce__()[2][{i}]", part
    yield from ((f".__reduce__()[1][{i}]", item) for i, item in enumerate(reduced[1]) if item is not type(value))
