"""Digests of a call's arguments, which are small and still show the first difference between two calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from colocate._system.imported import imported
from colocate._values.plain import PLAIN
from colocate.features.recordings.values import digest_of_bytes, is_named, named_parts

Digest: TypeAlias = Mapping[str, Sequence[Sequence[str]]]
"""By parameter: the path of each part, with a short description and a hash."""

_SHOWN = 40  # Values with more letters than this are stored as a digest.
_SINGLY = 16  # At most this many parts of a parameter have separate digests.
_SHORT = 8  # A list of plain values with more items than this gets a single digest.
_REST = "this and more"
_WHOLE = 1 << 16  # Of a tensor with more bytes than this, only a sample of the numbers is hashed.
_SAMPLE = 1024  # The number of hashed numbers of a large tensor.


def digest_of(arguments: Mapping[str, Any]) -> Digest:
    """Return digests of arguments by parameter. Only a fixed sample of a large tensor's numbers is hashed."""
    digest = {}
    for name, value in arguments.items():
        try:
            leaves = [*_leaves(value, "")]
        except RecursionError:
            leaves = [("", "what leads to itself")]
        except Exception:  # An error of user code must not fail the call.
            leaves = [("", f"a {type(value).__qualname__} that can't be looked into")]
        if rest := leaves[_SINGLY:]:
            leaves = [*leaves[:_SINGLY], (rest[0][0], f"{_REST}#{digest_of_bytes(repr(rest).encode())}")]
        digest[name] = leaves
    return digest


def first_difference(recorded: Digest, now: Digest) -> str | None:
    """Return a text about the first difference of two digests, or None if both are equal."""
    for name in dict.fromkeys([*recorded, *now]):
        if name not in recorded or name not in now:
            return f"{name} {_gone if name in recorded else _new}"
        before, after = ({leaf[0]: leaf[1] for leaf in digest[name]} for digest in (recorded, now))
        for path in dict.fromkeys([*before, *after]):
            if path not in before or path not in after:
                return f"{name}{path} {_gone if path in before else _new}"
            (was, _, contents), (has, _, new_contents) = before[path].partition("#"), after[path].partition("#")
            if was == has == _REST and contents != new_contents:
                return f"{name}{path}, or what comes after it, is another one"
            if was != has:
                return f"{name}{path} is {has}, and was {was}"
            if contents != new_contents:
                return f"{name}{path} is {has} with other contents"
    return None


_gone, _new = "was given, and is not", "is given, and was not"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    kind: type = type(value)
    if kind in PLAIN:
        yield path, _short(repr(value), value)
        return
    is_sequence = issubclass(kind, list | tuple | deque)
    if is_sequence and len(value) > _SHORT and PLAIN.issuperset(map(type, value)):
        contents = digest_of_bytes(repr([*value]).encode("utf-8", "backslashreplace"))
        yield path, f"{kind.__name__} of {len(value)}#{contents}"
        return
    torch, numpy = imported("torch"), imported("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        yield path, _of_tensor(torch, value)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        layout = f"{value.dtype}{[*value.shape]}"
        yield path, layout if value.dtype.hasobject else f"{layout}#{digest_of_bytes(_sample(numpy, value).tobytes())}"
    elif (parts := named_parts(value)) is not None:
        yield path, f"a {kind.__qualname__}"
        for inner, item in parts.items():
            yield from _leaves(item, path + inner)
    elif isinstance(value, dict):
        yield path, f"a {kind.__qualname__}"
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif is_sequence:
        yield path, f"{kind.__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, set | frozenset):
        yield path, f"{kind.__name__} of {len(value)}#{digest_of_bytes(repr(sorted(map(repr, value))).encode())}"
    elif numpy is not None and isinstance(value, numpy.generic):
        yield path, _short(repr(value.item()), value)
    elif isinstance(value, str | bytes | int | float):  # The value is an instance of a subclass.
        base: Any = next(item for item in kind.__mro__ if item in PLAIN)
        yield path, _short(base.__repr__(value), value)
    elif callable(value) and hasattr(value, "__qualname__"):
        yield path, _short(f"{value.__module__}.{value.__qualname__}", value)
    elif is_named(value):
        yield path, _short(repr(value), value)
    else:
        yield path, f"a {kind.__qualname__}"


def _short(text: str, value: Any) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{type(value).__name__} of {len(text)}#{digest_of_bytes(text.encode('utf-8', 'backslashreplace'))}"


def _of_tensor(torch: Any, tensor: Any) -> str:
    layout = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"
    tensor = tensor.detach()
    if tensor.is_nested and str(tensor.layout) == "torch.jagged":
        return f"{layout}#{_of_tensor(torch, tensor.values())}{_of_tensor(torch, tensor.offsets())}"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return layout
    if tensor.numel() * tensor.element_size() > _WHOLE:
        at = _at(tensor.numel(), str(tensor.device))
        tensor = tensor.view(-1)[at] if tensor.is_contiguous() else tensor[torch.unravel_index(at, tensor.shape)]
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return f"{layout}#{digest_of_bytes(data)}"


def _sample(numpy: Any, array: Any) -> Any:
    if array.nbytes <= _WHOLE:
        return array
    return array[numpy.unravel_index(_places(array.size), array.shape)]


@lru_cache(64)
def _at(count: int, device: str) -> Any:
    import torch

    return torch.tensor(_places(count), device=device)


def _places(count: int) -> list[int]:
    """Return indices for the hashed numbers of a large tensor, evenly spread from first to last."""
    return [index * (count - 1) // (_SAMPLE - 1) for index in range(_SAMPLE)]
