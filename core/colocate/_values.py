"""What becomes of a value when it leaves a role method, and how a write in place is noticed."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import attrs

from colocate._tree import map_leaves


def ordinary(value: Any) -> Any:
    """The value with its tensors detached from autograd, and inference tensors as ordinary ones.

    Shares memory with the value; only an inference tensor is cloned, since nothing but a copy can make it ordinary.
    """
    torch = sys.modules.get("torch")
    if torch is None or isinstance(value, int | float | str | None):
        return value

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.is_inference():
                with torch.inference_mode(False), torch.no_grad():
                    return item.clone()
            return item.detach() if item.requires_grad or isinstance(item, torch.nn.Parameter) else item
        apply = getattr(item, "apply", None)
        if apply is not None and type(item).__module__.startswith("tensordict"):
            return apply(leaf, filter_empty=False)
        return item

    return map_leaves(value, leaf)


@attrs.frozen
class Fingerprint:
    """The state of a value's tensors: their version counters, and their contents where asked for."""

    versions: tuple[int, ...]
    contents: bytes | None


def fingerprint(value: Any, contents: bool) -> Fingerprint:
    """What has to be equal as long as nobody writes into the value.

    Version counters see every write through torch's operators, at no cost; writes through NumPy, `.data` or a
    detached alias of other counters are seen in the contents only, which takes reading all of it.
    """
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    versions: list[int] = []
    digest = hashlib.blake2b(digest_size=16) if contents else None

    def leaf(item: Any) -> Any:
        if torch is not None and isinstance(item, torch.Tensor):
            versions.append(item._version)
            if digest is not None:
                dense = item.values() if item.is_nested else item
                flat = dense.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        elif digest is not None and numpy is not None and isinstance(item, numpy.ndarray) and item.dtype != object:
            digest.update(numpy.ascontiguousarray(item).tobytes())
        elif torch is not None and type(item).__module__.startswith("tensordict"):
            item.apply(leaf, filter_empty=False)
        return item

    map_leaves(value, leaf)
    return Fingerprint(tuple(versions), digest.digest() if digest is not None else None)


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a value (0 when there are none)."""
    total = 0

    def leaf(item: Any) -> Any:
        nonlocal total
        size = getattr(item, "nbytes", 0)
        total += size if isinstance(size, int) else 0
        return item

    map_leaves(value, leaf)
    return total


def describe(value: Any) -> Any:
    """The structure of a value with shapes and dtypes instead of contents, as plain data."""

    def leaf(item: Any) -> Any:
        shape = getattr(item, "shape", None)
        if shape is not None and hasattr(item, "dtype"):
            return f"{type(item).__name__}{[*shape]} {str(item.dtype).removeprefix('torch.')}"
        return type(item).__name__

    if isinstance(value, list) and len(value) > 8 and not hasattr(value[0], "shape"):
        return f"list[{len(value)}] of {type(value[0]).__name__}"
    return map_leaves(value, leaf)
