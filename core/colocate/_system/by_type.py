"""Cache results by type without keeping types alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_caches: list[dict[int, Any]] = []

T = TypeVar("T")


def by_type(find: Callable[[type], T]) -> Callable[[type], T]:
    """Cache a function's result for each type as long as the type lives.

    The result must not refer to the type. As fast as `functools.lru_cache`, which would keep users' classes, and all
    objects below them, for ever.
    """
    results: dict[int, tuple[T, weakref.ref[type]]] = {}
    _caches.append(results)

    @functools.wraps(find)
    def remembered(kind: type) -> T:
        key = id(kind)
        try:
            return results[key][0]
        except KeyError:
            result = find(kind)
            # The callback `results.pop` removes the entry before another object can get this id.
            # The callback is C code, so that no signal handler runs between the type's end and the removal.
            results[key] = result, weakref.ref(kind, functools.partial(results.pop, key))
            return result

    return remembered


def clear_caches() -> None:
    """Clear all caches, because a newly registered type may change results."""
    for cache in _caches:
        cache.clear()
