"""The tables of detached pools and of jobs' windows in a Ray cluster's own store.

An entry holds no resources. An entry is stale, and ignored, once the owner of the pool or the driver of the job is
gone. tests/ray/test_detached.py checks these uses of Ray's internal store.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.experimental import internal_kv

from colocate.executor import Window
from colocate.keeper import Registration
from colocate_ray.listing import list_living_jobs

NAMESPACE = "colocate"
_PREFIX = b"colocate/detached/"
_WINDOWS = b"colocate/windows/"

_put_value: Callable[..., bool] = internal_kv._internal_kv_put  # This function returns whether the key existed before.
_get_value: Callable[..., bytes | None] = internal_kv._internal_kv_get
_list_keys: Callable[..., list[bytes]] = internal_kv._internal_kv_list
_delete_key: Callable[..., int] = internal_kv._internal_kv_del


def publish(registration: Registration) -> bool:
    """Store the registration of a pool; return False if another pool has this name.

    A pool has only one name.
    """
    key, value = _PREFIX + registration.name.encode(), pickle.dumps(registration)
    owner = registration.facts[0]
    while True:
        if not _put_value(key, value, overwrite=False):
            break
        registered = _read_registration(key)
        if registered is not None and registered.facts[0] == owner:
            _put_value(key, value, overwrite=True)
            break
        if registered is not None and find_owner(registered.facts[0]) is not None:
            return False
        _delete_key(key)
    for other in _read_registrations():
        if other.facts[0] == owner and other.name != registration.name:
            _delete_key(_PREFIX + other.name.encode())
    return True


def registrations() -> list[Registration]:
    """List the registrations of all pools with live owners."""
    return [registration for registration in _read_registrations() if find_owner(registration.facts[0]) is not None]


def unpublish(owner: str) -> None:
    """Remove an owner's registrations, because the pool has ended or isn't detached after all."""
    for registration in _read_registrations():
        if registration.facts[0] == owner:
            _delete_key(_PREFIX + registration.name.encode())


def announce(window: Window) -> None:
    """Store a `Window` (address for `colocate top`) of this driver's job, and remove those of drivers that are gone."""
    job: str = ray.get_runtime_context().get_job_id()
    living = {*list_living_jobs(), job}
    for key, (other, _) in _read_windows():
        if other not in living:
            _delete_key(key)
    _put_value(_WINDOWS + window.id.encode(), pickle.dumps((job, window)), overwrite=True)


def retract(window: Window) -> None:
    """Remove a job's `Window` from the store."""
    _delete_key(_WINDOWS + window.id.encode())


def windows() -> list[Window]:
    """List the windows (addresses for `colocate top`) of all live drivers."""
    living = list_living_jobs()
    return [window for _, (job, window) in _read_windows() if job in living]


def _read_windows() -> Iterator[tuple[bytes, tuple[str, Window]]]:
    for key in _list_keys(_WINDOWS):
        if (value := _get_value(key)) is not None:
            yield key, pickle.loads(value)


def find_owner(name: str) -> Any:
    """Return Ray's handle of the owner with this name; None if the actor is gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _read_registrations() -> Iterator[Registration]:
    for key in _list_keys(_PREFIX):
        if (registration := _read_registration(key)) is not None:
            yield registration


def _read_registration(key: bytes) -> Registration | None:
    value = _get_value(key)
    return None if value is None else pickle.loads(value)
