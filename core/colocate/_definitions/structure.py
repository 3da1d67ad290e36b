"""Split values of types registered by `register_batch` into leaves, and rebuild values from leaves.

The sender sends the leaves, and the receiver rebuilds the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from colocate._system.by_type import by_type
from colocate._system.jobs import format_error
from colocate.errors import DispatchError

Leaves: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]


@attrs.frozen
class Structure:
    """A pair of functions that split values of a type into leaves and rebuild values from leaves."""

    leaves: Callable[[Any], Any]
    rebuild: Callable[[Any, Any], Any]

    def open_value(self, value: Any) -> Leaves:
        """Return the leaves of a value as a dict, list or tuple; convert other mappings and sequences."""
        name = type(value).__qualname__
        try:
            parts = self.leaves(value)
            if type(parts) in (dict, list, tuple):
                leaves: Leaves = parts
                return leaves
            if isinstance(parts, Mapping):
                return dict(parts)
            if isinstance(parts, list | tuple):
                return [*parts]
        except Exception as error:
            raise DispatchError(f"{name}: the leaves given to register_batch failed: {format_error(error)}") from error
        raise DispatchError(
            f"{name}: the leaves given to register_batch returned a {type(parts).__qualname__}; they return a dict, "
            "a list or a tuple of all that the value consists of"
        )

    def make_value(self, kind: type, leaves: Leaves) -> Any:
        """Rebuild a value of the type `kind` from leaves."""
        name = kind.__qualname__
        try:
            value = self.rebuild(kind, leaves)
        except Exception as error:
            raise DispatchError(f"{name}: the rebuild given to register_batch failed: {format_error(error)}") from error
        if not isinstance(value, kind):
            raise DispatchError(
                f"{name}: the rebuild given to register_batch returned a {type(value).__qualname__}; it "
                f"returns a value "
                "of the class that it is given"
            )
        return value


_structures: dict[type, Structure | None] = {}


def register_structure(kind: type, structure: Structure | None) -> None:
    """Register the structure of a type, which subclasses inherit. With None, values of the type aren't split."""
    _structures[kind] = structure


@by_type
def structure_of(kind: type) -> Structure | None:
    """Return the structure of a type or of the nearest registered base; None if there is none."""
    return next((_structures[base] for base in kind.__mro__ if base in _structures), None)


def iter_named(leaves: Leaves) -> Iterator[tuple[str, Any]]:
    """Return pairs of a leaf's path, in Python syntax, and the leaf."""
    pairs = leaves.items() if isinstance(leaves, dict) else enumerate(leaves)
    return ((f"[{key!r}]", leaf) for key, leaf in pairs)


def arrived(kind: type, leaves: Leaves) -> Any:
    structure = structure_of(kind)
    if structure is None:
        raise DispatchError(
            f"a {kind.__qualname__} has come as its leaves, and nobody has told this process how to make one: call "
            "register_batch in the module that defines the type, or in one that workers import (not in the script)"
        )
    return structure.make_value(kind, leaves)
