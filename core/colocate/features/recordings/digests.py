"""Small digests of a call's arguments, which still show the first difference between two calls' arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from colocate._system.imported import find_imported
from colocate._values.plain import PLAIN
from colocate.features.recordings.values import digest_bytes, is_named, named_parts

Digest: TypeAlias = Mapping[str, Sequence[Sequence[str]]]
"""By parameter: the path of each part, with a short description and a hash."""

_MOST_SHOWN = 40  # A value whose text has more characters than this is stored as a digest.
_SINGLY = 16  # At most this many parts of a parameter have separate digests.
_SHORT = 8  # A list of plain values with more items than this gets a single digest.
_REST = "this and more"
_WHOLE = 1 << 16  # Tensors with more bytes than this are hashed by a sample of their numbers.
_SAMPLE = 1024  # How many numbers of a large tensor are hashed.


def digest_arguments(arguments: Mapping[str, Any]) -> Digest:
    """Return digests of arguments by parameter. Only a fixed sample of a large tensor's numbers is hashed."""
    digest = {}
    for name, value in arguments.items():
        try:
            leaves = [*_iterate_leaves(value, "")]
        except RecursionError:
            leaves = [("", "what leads to itself")]
        except Exception:  # An error of user code must not fail the call.
            leaves = [("", f"a {type(value).__qualname__} that can't be looked into")]
        if rest := leaves[_SINGLY:]:
            leaves = [*leaves[:_SINGLY], (rest[0][0], f"{_REST}#{digest_bytes(repr(rest).encode())}")]
        digest[name] = leaves
    return digest


def find_difference(recorded: Digest, now: Digest) -> str | None:
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


def _iterate_leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    kind: type = type(value)
    if kind in PLAIN:
        yield path, _shorten_text(repr(value), value)
        return
    is_sequence = issubclass(kind, list | tuple | deque)
    if is_sequence and len(value) > _SHORT and PLAIN.issuperset(map(type, value)):
        contents = digest_bytes(repr([*value]).encode("utf-8", "backslashreplace"))
        yield path, f"{kind.__name__} of {len(value)}#{contents}"
        return
    torch, numpy = find_imported("torch"), find_imported("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        yield path, _digest_tensor(torch, value)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        layout = f"{value.dtype}{[*value.shape]}"
        yield (
            path,
            layout if value.dtype.hasobject else f"{layout}#{digest_bytes(_sample_bytes(numpy, value).tobytes())}",
        )
    elif (parts := named_parts(value)) is not None:
        yield path, f"a {kind.__qualname__}"
        for inner, item in parts.items():
            yield from _iterate_leaves(item, path + inner)
    elif isinstance(value, dict):
        yield path, f"a {kind.__qualname__}"
        for key, item in value.items():
            yield from _iterate_leaves(item, f"{path}[{key!r}]")
    elif is_sequence:
        yield path, f"{kind.__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _iterate_leaves(item, f"{path}[{index}]")
    elif isinstance(value, set | frozenset):
        yield path, f"{kind.__name__} of {len(value)}#{digest_bytes(repr(sorted(map(repr, value))).encode())}"
    elif numpy is not None and isinstance(value, numpy.generic):
        yield path, _shorten_text(repr(value.item()), value)
    elif isinstance(value, str | bytes | int | float):  # Only subclasses of these types come here.
        base: Any = next(item for item in kind.__mro__ if item in PLAIN)
        yield path, _shorten_text(base.__repr__(value), value)
    elif callable(value) and hasattr(value, "__qualname__"):
        yield path, _shorten_text(f"{value.__module__}.{value.__qualname__}", value)
    elif is_named(value):
        yield path, _shorten_text(repr(value), value)
    else:
        yield path, f"a {kind.__qualname__}"


def _shorten_text(text: str, value: Any) -> str:
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{type(value).__name__} of {len(text)}#{digest_bytes(text.encode('utf-8', 'backslashreplace'))}"


def _digest_tensor(torch: Any, tensor: Any) -> str:
    layout = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"
    tensor = tensor.detach()
    if tensor.is_nested and str(tensor.layout) == "torch.jagged":
        return f"{layout}#{_digest_tensor(torch, tensor.values())}{_digest_tensor(torch, tensor.offsets())}"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return layout
    if tensor.numel() * tensor.element_size() > _WHOLE:
        at = _sample_indices(tensor.numel(), str(tensor.device))
        tensor = tensor.view(-1)[at] if tensor.is_contiguous() else tensor[torch.unravel_index(at, tensor.shape)]
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return f"{layout}#{digest_bytes(data)}"


def _sample_bytes(numpy: Any, array: Any) -> Any:
    if array.nbytes <= _WHOLE:
        return array
    return array[numpy.unravel_index(_sample_places(array.size), array.shape)]


@lru_cache(64)
def _sample_indices(count: int, device: str) -> Any:
    import torch

    return torch.tensor(_sample_places(count), device=device)


def _sample_places(count: int) -> list[int]:
    """Return indices for the hashed numbers of a large tensor, evenly spread from first to last."""
    return [index * (count - 1) // (_SAMPLE - 1) for index in range(_SAMPLE)]
