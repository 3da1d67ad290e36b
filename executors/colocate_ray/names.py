"""The names of detached pools, and of jobs, in a Ray cluster: tables in its own store. Nothing is freed by them.

All that is used of Ray's internal store for that is here; tests/ray/test_detached.py guards it. The entry of a pool
whose owner is gone, or of a job whose driver is, is stale, and nobody's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.experimental import internal_kv

from colocate.executor import Window
from colocate.keeper import Registration
from colocate_ray.listing import living_jobs

NAMESPACE = "colocate"
_PREFIX = b"colocate/detached/"
_WINDOWS = b"colocate/windows/"

_put: Callable[..., bool] = internal_kv._internal_kv_put  # whether there was one already
_get: Callable[..., bytes | None] = internal_kv._internal_kv_get
_list: Callable[..., list[bytes]] = internal_kv._internal_kv_list
_delete: Callable[..., int] = internal_kv._internal_kv_del


def publish(registration: Registration) -> bool:
    """Enter a registration; False when another pool has that name. One pool has one name."""
    key, value = _PREFIX + registration.name.encode(), pickle.dumps(registration)
    owner = registration.facts[0]
    while True:
        if not _put(key, value, overwrite=False):
            break
        there = _read(key)
        if there is not None and there.facts[0] == owner:
            _put(key, value, overwrite=True)
            break
        if there is not None and owner_of(there.facts[0]) is not None:
            return False
        _delete(key)
    for other in _registrations():
        if other.facts[0] == owner and other.name != registration.name:
            _delete(_PREFIX + other.name.encode())
    return True


def registrations() -> list[Registration]:
    """Return the registrations of the pools that there are."""
    return [registration for registration in _registrations() if owner_of(registration.facts[0]) is not None]


def forget(owner: str) -> None:
    """An owner's pool is over, or isn't detached after all."""
    for registration in _registrations():
        if registration.facts[0] == owner:
            _delete(_PREFIX + registration.name.encode())


def announce(window: Window) -> None:
    """Enter a job of this driver's, and take out those of drivers that are gone."""
    job: str = ray.get_runtime_context().get_job_id()
    living = {*living_jobs(), job}
    for key, (other, _) in _windows():
        if other not in living:
            _delete(key)
    _put(_WINDOWS + window.id.encode(), pickle.dumps((job, window)), overwrite=True)


def retract(window: Window) -> None:
    """Take a job out."""
    _delete(_WINDOWS + window.id.encode())


def windows() -> list[Window]:
    """The jobs of all drivers that there are."""
    living = living_jobs()
    return [window for _, (job, window) in _windows() if job in living]


def _windows() -> Iterator[tuple[bytes, tuple[str, Window]]]:
    for key in _list(_WINDOWS):
        if (value := _get(key)) is not None:
            yield key, pickle.loads(value)


def owner_of(name: str) -> Any:
    """The owner of a name; None when it is gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _registrations() -> Iterator[Registration]:
    for key in _list(_PREFIX):
        if (registration := _read(key)) is not None:
            yield registration


def _read(key: bytes) -> Registration | None:
    value = _get(key)
    return None if value is None else pickle.loads(value)
