"""Values as safetensors documents, and back: tensors and arrays as they are, the rest in a pickle that runs no code.

A document is what `safetensors.torch.load` reads. Its entry "value" is the pickle, in which tensors and arrays are
numbers of other entries. Written and read are values of classes that are named here, and records: dataclasses, classes
of attrs, named tuples, enums, `UserDict`s, exceptions, and what `register_batch` was told the leaves of.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from colocate._definitions.structure import arrived, structure_of
from colocate._system.imported import imported
from colocate._values.leaving import fields
from colocate.errors import ColocateError, SerializationError

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""What safetensors calls the types of numbers, by what torch and numpy call them."""
_VALUE = "value"
MOST_HEADER = 1 << 27
_SAFE = (
    "builtins:bool bytearray bytes complex dict float frozenset int list range set slice str tuple",
    "collections:Counter OrderedDict defaultdict deque",
    "datetime:date datetime time timedelta timezone",
    "decimal:Decimal",
    "fractions:Fraction",
    "uuid:UUID",
    "pathlib:Path PosixPath PurePath PurePosixPath",
    "numpy:dtype",
    "numpy._core.multiarray:scalar",
    "torch:Size device",
)
_SAFE_MODULES = frozenset(each.partition(":")[0].partition(".")[0] for each in _SAFE)
Find = Callable[[str, str], Any]
"""Returns what a module calls so; None where it isn't to be had."""


class NotRecorded(ColocateError):
    """A value isn't of what is recorded."""


@cache
def _safe(module: str) -> frozenset[int]:
    """Return what may be named of modules of others, by its identity."""
    found = []
    for each in _SAFE:
        home, _, names = each.partition(":")
        if home.partition(".")[0] == module and imported(home) is not None:
            found += [id(getattr(sys.modules[home], name)) for name in names.split()]
    return frozenset(found)


def is_allowed(named: Any) -> bool:
    """Return whether a value may name a class or function."""
    module = str(getattr(named, "__module__", "torch")).partition(".")[0]
    if module in _SAFE_MODULES and id(named) in _safe(module):
        return True
    if not isinstance(named, type):
        torch = imported("torch")
        return torch is not None and isinstance(named, torch.dtype | torch.layout)
    of_tuples = issubclass(named, tuple) and hasattr(named, "_fields")
    others = issubclass(named, UserDict | enum.Enum | BaseException)
    return of_tuples or others or structure_of(named) is not None or bool(fields(named))


# -- to bytes


class _Pickler(pickle.Pickler):
    """Pickles a value, but for its tensors and arrays, which it lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.leaves: list[tuple[str, tuple[int, ...], Any]] = []  # type, shape and bytes

    def reducer_override(self, item: Any) -> Any:
        kind: type = type(item)
        torch, numpy = imported("torch"), imported("numpy")
        if torch is not None and isinstance(item, torch.Tensor):
            return self._of_tensor(torch, item)
        if numpy is not None and isinstance(item, numpy.ndarray):
            if kind is not numpy.ndarray or item.dtype.hasobject:
                raise NotRecorded(f"an array of {kind.__qualname__}, {item.dtype}, isn't recorded")
            number = self._add("uint8", (item.nbytes,), numpy.frombuffer(item.tobytes(), numpy.uint8))
            return _array, (number, item.dtype.str, item.shape)
        if kind is not type and (structure := structure_of(kind)) is not None:
            return _made, (kind, structure.open(item))
        is_named = (isinstance(item, type) or callable(item)) and hasattr(item, "__qualname__")
        if is_named and item not in _MADE and not is_allowed(item):
            raise NotRecorded(
                f"{item.__module__}.{item.__qualname__} isn't of what is recorded: tensors, arrays, numbers, texts, "
                "lists, dicts and sets of these, and records (dataclasses, classes of attrs, named tuples, enums, what "
                "register_batch was told the leaves= of)"
            )
        return NotImplemented

    def _add(self, dtype: str, shape: tuple[int, ...], data: Any) -> int:
        self.leaves.append((dtype, shape, data))
        return len(self.leaves) - 1

    def _of_tensor(self, torch: Any, tensor: Any) -> Any:
        if tensor.is_nested and str(tensor.layout) == "torch.jagged":
            parts = tensor.detach()
            return _jagged, (parts.values(), parts.offsets(), parts.lengths())
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or dtype not in NAMES or tensor.is_meta:
            what = f"{type(tensor).__qualname__}, {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise NotRecorded(f"a tensor of {what}, isn't recorded")
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        # What is on the host may be written to as soon as the call is over.
        copied = data.clone() if tensor.device.type == "cpu" else data.cpu()
        number = self._add(dtype, tuple(tensor.shape), copied.numpy())
        return _tensor, (number, dtype, tuple(tensor.shape), tensor.device.type != "cpu")


def _tensor(number: int, dtype: str, shape: tuple[int, ...], on_device: bool) -> Any:
    raise AssertionError("it is a name in pickles")


def _jagged(values: Any, offsets: Any, lengths: Any) -> Any:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths)


def _array(number: int, dtype: str, shape: tuple[int, ...]) -> Any:
    raise AssertionError("it is a name in pickles")


def _made(kind: type, leaves: Any) -> Any:
    return arrived(kind, leaves)


_MADE = (_tensor, _jagged, _array, _made)


def packed(value: Any, about: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Return a document in pieces that nobody else changes, and its length.

    Args:
        value: What it has.
        about: What is told of it besides, as JSON.

    Raises:
        NotRecorded: There is something in it that isn't recorded.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except NotRecorded:
        raise
    except RecursionError:
        raise NotRecorded("it has too many lists and mappings inside each other") from None
    except Exception as error:  # a class of users' says how it is pickled
        raise NotRecorded(f"it can't be pickled: {type(error).__name__}: {error}") from error
    leaves = {str(number): leaf for number, leaf in enumerate(pickler.leaves)}
    leaves[_VALUE] = "uint8", (file.tell(),), file.getbuffer()
    width = {name: _width(dtype) for name, (dtype, _, _) in leaves.items()}
    header: dict[str, Any] = {"__metadata__": {"colocate": json.dumps(about, separators=(",", ":"))}}
    pieces, end = list[Any](), 0
    for name in sorted(leaves, key=lambda name: -width[name]):  # each lies where its numbers may
        dtype, shape, data = leaves[name]
        begin, end = end, end + len(data)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        pieces.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces], 8 + len(text) + end


@cache
def _width(dtype: str) -> int:
    return 1 if dtype == "bool" else max(1, int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8) // 8)


# -- and back


def head_of(data: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return what a document tells of itself, its entries, and its length, given its beginning.

    Raises:
        ValueError: It is none.
    """
    header = json.loads(data)
    about = header.pop("__metadata__")["colocate"]
    return json.loads(about), header, max((each["data_offsets"][1] for each in header.values()), default=0)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, own: Mapping[str, Any], find: Find) -> None:
        super().__init__(io.BytesIO(data))
        self._own, self._find = own, find

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._own:
            return self._own[name]
        found = None
        if module.partition(".")[0] in _SAFE_MODULES:
            module = "numpy._core.multiarray" if module == "numpy.core.multiarray" else module
            found = getattr(import_module(module), name, None)
        if found is None or not is_allowed(found):
            found = self._find(module, name)
        if found is None or not is_allowed(found):
            raise SerializationError(
                f"{module}.{name}, of which a recorded value is made, isn't known here, or isn't a record: import its "
                "module before"
            )
        return found


def unpacked(data: Any, entries: Mapping[str, Any], find: Find, device: str | None = None) -> Any:
    """Return the value of a document.

    Args:
        data: What comes after its head, which is the value's own from now on.
        entries: From `head_of`.
        find: Finds classes of records.
        device: Where tensors go that were on a device; None for the host.

    Raises:
        SerializationError: It names what it mustn't, or what isn't here.
    """
    view = memoryview(data)

    def part(name: str) -> memoryview:
        begin, end = entries[name]["data_offsets"]
        return view[begin:end]

    def tensor(number: int, dtype: str, shape: tuple[int, ...], on_device: bool) -> Any:
        import torch

        kind = getattr(torch, dtype)
        lies_in = part(str(number))
        found = torch.frombuffer(lies_in, dtype=kind) if len(lies_in) else torch.empty(0, dtype=kind)
        found = found.reshape(shape)
        return found.to(device) if on_device and device is not None else found

    def array(number: int, dtype: str, shape: tuple[int, ...]) -> Any:
        import numpy

        return numpy.frombuffer(part(str(number)), numpy.dtype(dtype)).reshape(shape)

    own = {"_tensor": tensor, "_array": array, "_jagged": _jagged, "_made": _made}
    return _Unpickler(part(_VALUE), own, find).load()


def finder(packages: Collection[str] = (), names: Sequence[Mapping[str, Any]] = ()) -> Find:
    """Return what finds classes in modules that are imported, or that are of some packages.

    Args:
        packages: These may be imported.
        names: Globals of role code: for classes that only it knows, of the script say.
    """

    def find(module: str, name: str) -> Any:
        first, *inner = name.split(".")
        places = [each for each in names if each.get("__name__") == module or first in each]
        home = imported(module)
        if home is None and module.partition(".")[0] in packages:
            home = import_module(module)
        for place in (*([] if home is None else [vars(home)]), *places):
            found = place.get(first)
            for each in inner:
                found = getattr(found, each, None)
            if found is not None and getattr(found, "__module__", module) == module:
                return found
        return None

    return find
