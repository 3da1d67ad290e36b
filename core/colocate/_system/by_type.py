"""What is worked out once for each type, without holding the type."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_caches: list[dict[int, Any]] = []

T = TypeVar("T")


def by_type(find: Callable[[type], T]) -> Callable[[type], T]:
    """Remember a function's result for each type as long as the type is there; the result must not hold the type.

    As fast as `functools.lru_cache`, which would keep users' classes, and all that hangs on them, for ever.
    """
    found: dict[int, tuple[T, weakref.ref[type]]] = {}
    _caches.append(found)

    @functools.wraps(find)
    def remembered(kind: type) -> T:
        key = id(kind)
        try:
            return found[key][0]
        except KeyError:
            result = find(kind)
            # Its entry goes before anything else can have its id. No Python code runs then, so that no signal's
            # handler comes between: this is `found.pop(key, the reference)`.
            found[key] = result, weakref.ref(kind, functools.partial(found.pop, key))
            return result

    return remembered


def forget() -> None:
    """Have every such function work its results out anew: somebody has said what a type is."""
    for found in _caches:
        found.clear()
