"""Encode values as safetensors documents, with tensors and arrays as raw bytes and other values as JSON.

A document is readable by `safetensors.torch.load`. Its entry "value" is JSON: numbers, texts, true, false and null
stand for themselves, and any other value is a list [KIND, CONTENT]. Kinds are a closed list. A value that occurs twice
has a number, [KIND, CONTENT, NUMBER], and is ["again", NUMBER] elsewhere.

A record (dataclass, class of attrs, named tuple, enum, `UserDict`, exception, type with leaves of `register_batch`) is
stored as the name of its class and its content. A reader finds the class among imported modules and sets the
attributes: it calls no constructor and no `__setstate__`. A class whose code would run nonetheless (`__del__`, or
`__hash__` for a key) isn't recorded and isn't read.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import json
import math
import pathlib
import sys
import types
import uuid
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import Any, cast

import attrs

from colocate._definitions.structure import arrived, iter_named, structure_of
from colocate._system.by_type import by_type
from colocate._system.imported import find_imported
from colocate._system.jobs import format_error
from colocate._values.leaving import list_fields
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
"""The names of number types in safetensors, by their names in torch and NumPy."""
_VALUE = "value"
MOST_HEADER = 1 << 27
SCALARS = frozenset({int, float, str, bool, type(None)})
"""Types whose values stand for themselves in JSON."""
Find = Callable[[str, str], Any]
"""Returns the class of a module and a qualified name; None if not found."""


class UnrecordableError(ColocateError):
    """Raised if the type of a value can't be recorded."""


def _build_mapping(kind: Callable[[], Any]) -> Callable[[Sequence[Any]], Any]:
    def make(parts: Sequence[Any]) -> Any:
        mapping, keys = kind(), _check_keys(parts[::2])
        for key, value in zip(keys, parts[1::2], strict=True):
            mapping[key] = value
        return mapping

    return make


def _build_collection(kind: Callable[[Collection[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda parts: kind(_check_keys(parts))


def _split_pairs(value: Any) -> list[Any]:
    _check_keys(value)
    return [*chain.from_iterable(value.items())]


def _sort_members(value: Any) -> list[Any]:
    return [*_check_keys(value)]


def _reduce_value(value: Any) -> Sequence[Any]:
    parts: Sequence[Any] = value.__reduce_ex__(4)[1]
    return parts


def _build_reduced(kind: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda parts: kind(*parts)


_PARTS: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[Sequence[Any]], Any]]] = {
    list: (list, list),
    tuple: (list, tuple),
    dict: (_split_pairs, _build_mapping(dict)),
    set: (_sort_members, _build_collection(set)),
    frozenset: (_sort_members, _build_collection(frozenset)),
    OrderedDict: (_split_pairs, _build_mapping(OrderedDict)),
    Counter: (_split_pairs, _build_mapping(Counter)),
    complex: (lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
}
"""The parts of a value by type, and the inverse; types of `_REDUCED` are called with the arguments of their pickle."""
_REDUCED: tuple[Any, ...] = (
    *(range, decimal.Decimal),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
)
_PARTS |= {kind: (_reduce_value, _build_reduced(kind)) for kind in _REDUCED}
_MAKERS = {kind.__name__: make for kind, (_, make) in _PARTS.items()}
_OF_ANY = {kind.__name__ for kind in (list, tuple, dict, set, frozenset, OrderedDict, Counter)}
_PLAIN = {*SCALARS, bytes, datetime.timedelta, datetime.timezone}


def _check_parts(kind: str, parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a value. Raise `UnrecordableError` if a constructor would run user code of a part's class."""
    for part in parts if kind not in _OF_ANY else ():
        if type(part) not in _PLAIN:
            raise UnrecordableError(f"a {kind} of a {type(part).__qualname__} isn't recorded")
    return parts


@by_type
def record_kind(kind: type) -> str | None:
    """Return how instances of a class are stored as records, such as "error", or None if they aren't."""
    record_type = None
    if structure_of(kind) is not None:
        record_type = "leaves"
    elif issubclass(kind, enum.Enum):
        record_type = "member"
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        record_type = "named"
    elif issubclass(kind, BaseException):
        record_type = "error"
    elif dataclasses.is_dataclass(kind) or attrs.has(kind) or issubclass(kind, UserDict):
        record_type = "record"
    # Refuse a class with `__del__`, because this code would run with attributes from a possibly hostile recording.
    return None if hasattr(kind, "__del__") else record_type


def named_parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a record or TensorDict by path, or None for any other value."""
    kind = type(value)
    if (structure := structure_of(kind)) is not None:
        return dict(iter_named(structure.open_value(value)))
    tensordict = find_imported("tensordict")
    if tensordict is not None and kind is tensordict.TensorDict:
        return {f"[{key!r}]": part for key, part in value.items()}
    if issubclass(kind, BaseException):
        return {".args": value.args, **{f".{name}": part for name, part in _read_attributes(value).items()}}
    if record_kind(kind) == "record":
        return {f".{name}": getattr(value, name, None) for name in list_fields(kind)}
    return None


def is_named(value: Any) -> bool:
    """Return whether the `repr` of a value identifies the value, as for dates, paths, enums and dtypes."""
    torch, numpy = find_imported("torch"), find_imported("numpy")
    named = [enum.Enum, slice, fractions.Fraction, uuid.UUID, *_PARTS, *([] if numpy is None else [numpy.dtype])]
    named += [] if torch is None else [torch.dtype, torch.device, torch.layout, torch.memory_format]
    return isinstance(value, tuple(named))


# -- to bytes


@attrs.frozen
class _DocumentLeaf:
    dtype: str  # The name of the dtype in torch.
    shape: tuple[int, ...]
    data: Any
    width: int  # The alignment in bytes.


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[_DocumentLeaf] = []
        # The value and the JSON node by the value's id. The reference to the value keeps the id valid.
        self._node_ids: dict[int, tuple[Any, list[Any]]] = {}
        self._numbers = 0

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        _, node = self._node_ids.get(id(value), (None, None))
        if node is not None:
            if not node:
                raise UnrecordableError(f"a {kind.__qualname__} that leads to itself isn't recorded")
            if len(node) == 2:
                self._numbers += 1
                node.append(self._numbers)
            return ["again", node[2]]
        node = []
        self._node_ids[id(value)] = value, node
        node_fields = self._encode_node(kind, value)
        node += node_fields
        return node

    def _encode_all(self, parts: Sequence[Any]) -> Sequence[Any]:
        return parts if SCALARS.issuperset(map(type, parts)) else [self.encode(part) for part in parts]

    def _encode_node(self, kind: type, value: Any) -> list[Any]:
        if kind in _PARTS:
            return [kind.__name__, self._encode_all(_check_parts(kind.__name__, _PARTS[kind][0](value)))]
        if kind in (bytes, bytearray):
            return [kind.__name__, self._add_leaf("uint8", (len(value),), bytes(value), 1)]
        torch, numpy, tensordict = find_imported("torch"), find_imported("numpy"), find_imported("tensordict")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._encode_tensor(torch, value)
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._encode_array(numpy, kind, value)
        if torch is not None and kind is torch.Size:
            return ["Size", [*value]]
        if tensordict is not None and kind is tensordict.TensorDict:
            return ["TensorDict", [[*value.batch_size], self.encode(dict(value.items()))]]
        return self._encode_record(kind, value)

    def _encode_record(self, kind: type, value: Any) -> list[Any]:
        name, how = f"{kind.__module__}:{kind.__qualname__}", record_kind(kind)
        if how is None or "<locals>" in name:
            why = ": it is defined within a function" if how is not None else _recorded
            raise UnrecordableError(f"{kind.__module__}.{kind.__qualname__} isn't recorded{why}")
        if how == "leaves":
            structure = structure_of(kind)
            assert structure is not None
            return [how, [name, self.encode(structure.open_value(value))]]
        if how == "member":
            return [how, [name, value._value_ if isinstance(value, enum.Flag) else value._name_]]
        if how == "named":
            return [how, [name, self._encode_all([*value])]]
        if how == "error":
            return [how, [name, self.encode(value.args), self.encode(_read_attributes(value))]]
        base = _find_base(kind)
        items = None if base is object else self._encode_all([*chain.from_iterable(base.items(value))])
        return [how, [name, items, self.encode(_read_attributes(value))]]

    def _add_leaf(self, dtype: str, shape: tuple[int, ...], data: Any, width: int) -> int:
        self.leaves.append(_DocumentLeaf(dtype, shape, data, width))
        return len(self.leaves) - 1

    def _encode_array(self, numpy: Any, kind: type, value: Any) -> list[Any]:
        array = numpy.asarray(value)
        if isinstance(value, numpy.ndarray) and kind is not numpy.ndarray:
            raise UnrecordableError(f"an array of {kind.__qualname__}, {array.dtype}, isn't recorded")
        number = self._add_leaf("uint8", (array.nbytes,), array.tobytes(), math.gcd(array.dtype.alignment, 8))
        return ["array" if array is value else "scalar", [number, _dtype_code(array.dtype), [*array.shape]]]

    def _encode_tensor(self, torch: Any, tensor: Any) -> list[Any]:
        if tensor.is_nested and str(tensor.layout) == "torch.jagged":
            parts = tensor.detach()
            if parts._ragged_idx != 1:
                raise UnrecordableError(f"a jagged tensor whose dimension {parts._ragged_idx} is ragged isn't recorded")
            return ["jagged", self._encode_all([parts.values(), parts.offsets(), parts.lengths()])]
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or dtype not in NAMES or tensor.is_meta:
            description = f"{type(tensor).__qualname__}, {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise UnrecordableError(f"a tensor of {description}, isn't recorded")
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        # Copy the data, because the role may write to host memory as soon as the call has ended.
        copied = data.clone() if tensor.device.type == "cpu" else data.cpu()
        number = self._add_leaf(dtype, tuple(tensor.shape), copied.numpy(), tensor.element_size())
        return ["tensor", [number, dtype, [*tensor.shape], tensor.device.type != "cpu"]]


_recorded = (
    ": tensors, arrays, numbers, texts, lists, dicts and sets of these are, and records (dataclasses, classes of "
    "attrs, named tuples, enums, exceptions, TensorDicts, types with leaves= of register_batch) without __del__"
)


def _find_base(kind: type) -> Any:
    """Return the builtin base type that can create a record of a class without running user code."""
    base: Any = next(base_class for base_class in (OrderedDict, dict, object) if issubclass(kind, base_class))
    try:
        base.__new__(kind)
    except TypeError as error:
        raise UnrecordableError(f"{kind.__module__}.{kind.__qualname__} isn't recorded: {error}") from None
    return base


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return all attributes of an object, including attributes in `__slots__`."""
    kind = type(value)
    attributes = dict(_get_dict(value)) if kind.__dictoffset__ else {}
    for name in _list_slots(kind):
        member = _find_slot(kind, name)
        try:
            part = member.__get__(value)
        except AttributeError:  # This `__slots__` attribute is unset.
            continue
        if part is not None or member.__objclass__.__flags__ & _HEAP_TYPE:
            attributes[name] = part
    return attributes


def _get_dict(value: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object.

    Raise `UnrecordableError` if the class overrides the `__dict__` descriptor.
    """
    kind: type = type(value)
    names = next(names for base in kind.__mro__ if "__dict__" in (names := _class_names(base)))
    if type(names["__dict__"]) is not types.GetSetDescriptorType:
        raise UnrecordableError(f"{kind.__module__}.{kind.__qualname__} isn't recorded: it has a __dict__ of its own")
    attributes: dict[str, Any] = names["__dict__"].__get__(value)
    return attributes


@by_type
def _list_slots(kind: type) -> Collection[str]:
    return {
        name
        for base in kind.__mro__
        for name, member in _class_names(base).items()
        if type(member) is types.MemberDescriptorType and (base.__flags__ & _HEAP_TYPE or name in _BESIDES_ARGS)
    }


def _find_slot(kind: type, name: str) -> Any:
    """Return the descriptor of a `__slots__` attribute, even if a property of the same name hides it."""
    members = (_class_names(base).get(name) for base in kind.__mro__)
    return next(member for member in members if type(member) is types.MemberDescriptorType)


_HEAP_TYPE = 1 << 9  # The flag of classes that are defined in Python.
# The attributes that builtin exceptions have besides `args`.
_BESIDES_ARGS = {"filename", "filename2", "name", "name_from", "obj", "path"}


def _check_keys(keys: Collection[Any]) -> Collection[Any]:
    """Check that hashing mapping keys or set members runs no user code, and return `keys`.

    Raise `UnrecordableError` if a key's class has a user-defined `__hash__` or `__eq__`.
    """
    if SCALARS.issuperset(map(type, keys)):
        return keys
    for key in keys:
        kind: Any = type(key)
        if isinstance(key, tuple) and kind.__hash__ is tuple.__hash__ and kind.__eq__ is tuple.__eq__:
            _check_keys([*tuple.__iter__(key)])
        elif kind not in _PARTS:
            is_own = kind.__hash__ is enum.Enum.__hash__ or isinstance(kind.__hash__, types.WrapperDescriptorType)
            if not is_own or not isinstance(kind.__eq__, types.WrapperDescriptorType):
                problem = f"a {kind.__qualname__} as a key, or in a set, isn't recorded"
                raise UnrecordableError(f"{problem}: its class says itself how it is hashed")
    return keys


def _dtype_code(dtype: Any) -> str:
    """Return a dtype's code in NumPy's file format.

    Raise `UnrecordableError` if the format can't represent the dtype.
    """
    from numpy.lib.format import dtype_to_descr

    with suppress(TypeError, ValueError):
        code = repr(dtype_to_descr(dtype))
        if _parse_dtype(code) == dtype:
            return code
    raise UnrecordableError(f"NumPy's {dtype!r} isn't recorded")


def encode_document(value: Any, about: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Encode a value as a document, and return the document's pieces of bytes and their total length.

    No other code changes the pieces. `seal_document` fills in the blank seal.

    Args:
        value: The value of the document.
        about: The metadata, plain JSON.

    Raises:
        UnrecordableError: The value has a part that can't be recorded.
    """
    encoder = _Encoder()
    try:
        text = json.dumps(encoder.encode(value), separators=(",", ":")).encode()
    except UnrecordableError:
        raise
    except RecursionError:
        raise UnrecordableError("it has too many lists and mappings inside each other") from None
    except Exception as error:  # The `leaves=` of `register_batch` may raise any error.
        raise UnrecordableError(f"it can't be taken apart: {format_error(error)}") from error
    leaves = {str(number): leaf for number, leaf in enumerate(encoder.leaves)}
    leaves[_VALUE] = _DocumentLeaf("uint8", (len(text),), text, 1)
    header: dict[str, Any] = {
        "__metadata__": {"seal": "0" * _SEAL, "colocate": json.dumps(about, separators=(",", ":"))}
    }
    pieces, end = list[Any](), 0
    # The leaves with the widest alignment come first, so that each leaf is aligned.
    for name, leaf in sorted(leaves.items(), key=lambda each: -each[1].width):
        begin, end = end, end + len(leaf.data)
        header[name] = {"dtype": NAMES[leaf.dtype], "shape": leaf.shape, "data_offsets": (begin, end)}
        pieces.append(leaf.data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little") + head, *pieces], 8 + len(head) + end


# -- seals

_PREFIX = b'{"__metadata__":{"seal":"'
_SEAL = 64
START = 8 + len(_PREFIX) + _SEAL
"""The length of a document's start in bytes: lengths, and digests of head, body and the start itself."""


def digest_bytes(*pieces: Any) -> str:
    """Return the BLAKE2b digest of pieces of bytes, as 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def seal_document(pieces: Sequence[Any]) -> list[Any]:
    """Fill the length and the digests into the head of a document, and return the pieces."""
    first, *body = pieces
    digests = f"{sum(map(len, body)):016x}{digest_bytes(first[START:])}{digest_bytes(*body)}".encode()
    start = first[: START - _SEAL] + digests
    return [start + digest_bytes(start).encode() + first[START:], *body]


@attrs.frozen
class DocumentStart:
    """The decoded first bytes of a document: the lengths and digests of head and body."""

    head: int
    body: int
    head_digest: str
    body_digest: str

    @classmethod
    def from_bytes(cls, data: bytes) -> DocumentStart:
        """Decode the first `START` bytes of a document.

        Raises:
            ValueError: The bytes are damaged.
        """
        if data[-16:] != digest_bytes(data[:-16]).encode() or data[8 : 8 + len(_PREFIX)] != _PREFIX:
            raise ValueError("it isn't the beginning of an entry as it was written")
        seal = data[START - _SEAL :].decode()
        length = int.from_bytes(data[:8], "little")
        if not START - 8 <= length <= MOST_HEADER:
            raise ValueError(f"a head of {length:,} bytes")
        return cls(8 + length, int(seal[:16], 16), seal[16:32], seal[32:48])


# -- from bytes


def parse_head(data: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Parse the JSON head of a document, and return the metadata, the entries and the length of the body.

    Raises:
        ValueError: The bytes are no head of a document.
    """
    try:
        header = json.loads(data)
        about = json.loads(header.pop("__metadata__")["colocate"])
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if not isinstance(about, dict) or not all(type(end) is int for end in ends):
            raise ValueError("it isn't what a document begins with")
        return about, header, max(ends, default=0)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(format_error(error)) from error


class _Decoder:
    def __init__(self, data: Any, entries: Mapping[str, Any], find: Find, device: str | None) -> None:
        self._view, self._entries, self._find, self._device = memoryview(data), entries, find, device
        self._decoded: dict[int, Any] = {}
        self._special: Mapping[str, Callable[[Any], Any]] = {
            "bytes": lambda number: bytes(self.read_part(number)),
            "bytearray": lambda number: bytearray(self.read_part(number)),
            "tensor": lambda content: self._decode_tensor(*content),
            "jagged": lambda content: _build_jagged(*self._decode_all(content)),
            "array": lambda content: self._decode_array(*content),
            "scalar": lambda content: self._decode_array(*content)[()],
            "Size": lambda sizes: _get_torch().Size(sizes),
            "TensorDict": lambda content: _build_tensordict(content[0], self.decode_value(content[1])),
            "leaves": lambda content: arrived(self._find_class(content[0], "leaves"), self.decode_value(content[1])),
            "member": lambda content: _find_member(self._find_class(content[0], "member"), content[1]),
            "named": lambda content: tuple.__new__(self._find_class(content[0], "named"), self._decode_all(content[1])),
            "error": lambda content: create_error(
                self._find_class(content[0], "error"), self.decode_value(content[1]), self.decode_value(content[2])
            ),
            "record": lambda content: self._decode_record(*content),
        }

    def read_part(self, name: int | str) -> memoryview:
        begin, end = self._entries[str(name)]["data_offsets"]
        return self._view[begin:end]

    def decode_value(self, node: Any) -> Any:
        if type(node) in SCALARS:
            return node
        kind, content, *number = node
        if kind == "again":
            return self._decoded[content]
        make = _MAKERS.get(kind)
        result = self._special[kind](content) if make is None else make(_check_parts(kind, self._decode_all(content)))
        if number:
            self._decoded[number[0]] = result
        return result

    def _decode_all(self, content: Sequence[Any]) -> Sequence[Any]:
        return content if SCALARS.issuperset(map(type, content)) else [self.decode_value(part) for part in content]

    def _find_class(self, name: str, how: str) -> Any:
        module, _, qualname = name.partition(":")
        cls = self._find(module, qualname)
        if cls is None or record_kind(cls) != how:
            problem = (
                "isn't known here: import its module before" if cls is None else "isn't a class that is recorded so"
            )
            raise SerializationError(f"{module}.{qualname}, of which a recorded value is made, {problem}")
        return cls

    def _decode_record(self, name: str, items: Any, attributes: Any) -> Any:
        kind = self._find_class(name, "record")
        base = _find_base(kind)
        record = base.__new__(kind)
        if items is not None:
            parts = self._decode_all(items)
            for key, value in zip(_check_keys(parts[::2]), parts[1::2], strict=True):
                base.__setitem__(record, key, value)
        _set_attributes(record, self.decode_value(attributes))
        return record

    def _decode_tensor(self, number: int, dtype: str, shape: Sequence[int], on_device: bool) -> Any:
        torch = _get_torch()
        kind, lies_in = vars(torch)[next(name for name in NAMES if name == dtype)], self.read_part(number)
        tensor = torch.frombuffer(lies_in, dtype=kind) if len(lies_in) else torch.empty(0, dtype=kind)
        tensor = tensor.reshape(shape)
        return tensor.to(self._device) if on_device and self._device is not None else tensor

    def _decode_array(self, number: int, code: str, shape: Sequence[int]) -> Any:
        import numpy

        dtype, part = _parse_dtype(code), self.read_part(number)
        return numpy.ndarray(shape, dtype, part) if len(part) else numpy.zeros(shape, dtype)


def _get_torch() -> Any:
    import torch

    return torch


def _parse_dtype(code: str) -> Any:
    from numpy.lib.format import descr_to_dtype

    dtype = descr_to_dtype(ast.literal_eval(code))
    if dtype.hasobject:
        raise ValueError(f"{dtype} has objects")
    return dtype


def _build_jagged(values: Any, offsets: Any, lengths: Any) -> Any:
    torch = _get_torch()
    if any(type(tensor) is not torch.Tensor for tensor in (values, offsets, lengths) if tensor is not None):
        raise ValueError("the parts of a jagged tensor are no tensors")
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths)


def _build_tensordict(batch_size: Sequence[int], items: Any) -> Any:
    if type(items) is not dict or any(type(name) is not str for name in items):
        raise ValueError("the parts of a TensorDict are no dict of names")
    import tensordict

    kinds = (_get_torch().Tensor, tensordict.TensorDict, tensordict.NonTensorData)
    if not all(issubclass(type(item), kinds) for item in items.values()):
        raise ValueError("the parts of a TensorDict are no tensors")

    return tensordict.TensorDict(items, batch_size=batch_size)


def _find_member(kind: Any, name: str | int) -> Any:
    if not issubclass(kind, enum.Flag):
        return kind._member_map_[name]
    member, missing = kind._value2member_map_.get(name), cast("Any", enum.Flag._missing_)
    return missing.__func__(kind, int(name)) if member is None else member


def create_error(kind: type[BaseException], args: Any, attributes: Any) -> BaseException:
    """Create an exception by the constructor of the builtin base class, so that no user code runs."""
    if type(args) is not tuple:
        raise ValueError("the arguments of an exception are no tuple")
    base: Any = next(base_class for base_class in cast("Any", kind).__mro__ if not base_class.__flags__ & _HEAP_TYPE)
    is_group = base.__name__ == "BaseExceptionGroup" and [*map(type, args)] in ([str, list], [str, tuple])
    # Pass only safe arguments, because some constructors call methods of the arguments, which may be user code.
    plain_args = args if is_group or _is_plain(args) else ()
    error: BaseException = base.__new__(kind, *plain_args)
    base.__init__(error, *plain_args)
    _set_args(error, args)
    _set_attributes(error, attributes)
    return error


_set_args: Any = vars(BaseException)["args"].__set__


def _is_plain(args: Any) -> bool:
    return all(_is_plain(arg) if type(arg) is tuple else type(arg) in {*SCALARS, bytes} for arg in args)


def _set_attributes(made: Any, attributes: Any) -> None:
    if type(attributes) is not dict or any(type(name) is not str for name in attributes):
        raise ValueError("attributes are no dict of names")
    kind: type = type(made)
    for name, value in attributes.items():
        if name in _list_slots(kind):
            _find_slot(kind, name).__set__(made, value)
        else:
            _get_dict(made)[name] = value


def decode_document(data: Any, entries: Mapping[str, Any], find: Find, device: str | None = None) -> Any:
    """Decode the value of a document.

    Args:
        data: The bytes after the head. The value shares this memory.
        entries: From `parse_head`.
        find: Finds classes of records.
        device: The device for tensors that were on a device; None for the host.

    Raises:
        SerializationError: The document is damaged, or a class isn't found.
    """
    try:
        decoder = _Decoder(data, entries, find, device)
        return decoder.decode_value(json.loads(bytes(decoder.read_part(_VALUE))))
    except SerializationError:
        raise
    except Exception as error:  # The contents of a file may be anything.
        raise SerializationError(f"it isn't a value that was recorded: {format_error(error)}") from error


def make_finder(packages: Collection[str] = (), names: Sequence[Mapping[str, Any]] = ()) -> Find:
    """Return a function that finds classes in imported modules, or in modules of the given packages.

    Args:
        packages: Packages that may be imported.
        names: Globals of role code: for classes of the script, for example.
    """

    def find(module: str, name: str) -> Any:
        first, *inner = name.split(".")
        if module not in sys.modules and module.partition(".")[0] in packages:
            import_module(module)
        home = sys.modules.get(module)
        places = [namespace for namespace in names if namespace.get("__name__") == module or first in namespace]
        for place in (*([] if home is None else [_module_names(home)]), *places):
            candidate = place.get(first)
            for namespace in inner:
                candidate = _class_names(candidate).get(namespace)
            if issubclass(type(candidate), type) and _module_of(candidate) == module:
                return candidate
        return None

    return find


_module_of = type.__dict__["__module__"].__get__  # Builtin classes have no `__module__` in their own `__dict__`.


def _module_names(module: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of a module without triggering a lazy import."""
    try:
        names: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names


def _class_names(found: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of a class without running user code, or an empty mapping for any other object."""
    if not issubclass(type(found), type):
        return {}
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(found)
    return names
