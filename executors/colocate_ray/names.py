"""The names of detached pools in a Ray cluster: a table in Ray's own store. Nobody needs it to free anything.

All that is used of Ray's internal store is here; tests/ray/test_detached.py guards it. An entry whose custodian is gone
is stale, and nobody's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.experimental import internal_kv

from colocate.keeper import Title

NAMESPACE = "colocate"
_PREFIX = b"colocate/detached/"

_put: Callable[..., bool] = internal_kv._internal_kv_put  # whether there was one already
_get: Callable[..., bytes | None] = internal_kv._internal_kv_get
_list: Callable[..., list[bytes]] = internal_kv._internal_kv_list
_delete: Callable[..., int] = internal_kv._internal_kv_del


def publish(title: Title) -> bool:
    """Enter a title; False when another pool has that name. One pool has one name."""
    key, value = _PREFIX + title.name.encode(), pickle.dumps(title)
    custodian = title.facts[0]
    while True:
        if not _put(key, value, overwrite=False):
            break
        there = _read(key)
        if there is not None and there.facts[0] == custodian:
            _put(key, value, overwrite=True)
            break
        if there is not None and custodian_of(there.facts[0]) is not None:
            return False
        _delete(key)
    for other in _titles():
        if other.facts[0] == custodian and other.name != title.name:
            _delete(_PREFIX + other.name.encode())
    return True


def titles() -> list[Title]:
    """Those of the pools that there are."""
    return [title for title in _titles() if custodian_of(title.facts[0]) is not None]


def forget(custodian: str) -> None:
    """A custodian's pool is over, or isn't detached after all."""
    for title in _titles():
        if title.facts[0] == custodian:
            _delete(_PREFIX + title.name.encode())


def custodian_of(name: str) -> Any:
    """The custodian of a name; None when it is gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _titles() -> Iterator[Title]:
    for key in _list(_PREFIX):
        if (title := _read(key)) is not None:
            yield title


def _read(key: bytes) -> Title | None:
    value = _get(key)
    return None if value is None else pickle.loads(value)
