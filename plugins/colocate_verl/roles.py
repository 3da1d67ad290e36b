"""Convert a verl worker class to a role with the class's name and methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import colocate
from colocate import Dispatch, Ranks, method

from . import private

Payload = tuple[tuple[Any, ...], dict[str, Any]]  # A method's positional and named arguments on one rank.
CALL = "ray_call"  # This method of each role runs a function on the worker, like Ray's `__ray_call__`.


class Payloads(Dispatch):
    """A dispatch that sends item i of `payload` to a call's i-th rank. verl itself has split the arguments before."""

    accepts_deferred: ClassVar[bool] = False
    selectable: ClassVar[bool] = True

    def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
        """Return each rank's arguments. Ranks with the same payload object share one mapping."""
        parts: list[Mapping[str, Any]] = [arguments] * ranks.world_size
        parts_by_id: dict[int, Mapping[str, Any]] = {}
        targets = range(ranks.world_size) if ranks.targets is None else ranks.targets
        for rank, payload in zip(targets, arguments.get("payload", ()), strict=False):
            parts[rank] = parts_by_id.setdefault(id(payload), {"payload": payload})
        return parts


class Siblings(Mapping[str, Any]):
    """A `fused_worker_dict` for verl that looks up siblings on access, so that a role's memory includes no sibling."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return find_sibling(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def find_sibling(name: str) -> Any:
    """Return the verl worker of a sibling role."""
    return colocate.context().sibling(name, VerlRole).worker


class VerlRole:
    """Base class of roles that contain a verl worker. `make_role` adds the worker's methods."""

    def __init__(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> None:
        self.worker = cls(*args, **kwargs)
        private.set_siblings(self.worker, Siblings(names))


@functools.cache
def make_role(cls: type) -> type[VerlRole]:
    """Build a role class from a verl class. The role class is pickled by value, because no module contains it."""
    methods = {name: _role_method(cls, name) for name in dir(cls) if _is_method(cls, name)}
    methods[CALL] = method(dispatch=Payloads())(_call_for_ray)
    return type(cls.__name__, (VerlRole,), {"__qualname__": cls.__qualname__, "__module__": __name__, **methods})


def _is_method(cls: type, name: str) -> bool:
    """Return whether callers can use a method, because the method is public or marked by verl's `@register`."""
    attribute = inspect.getattr_static(cls, name)
    if isinstance(attribute, property | type) or not callable(getattr(cls, name, None)):
        return False
    return not name.startswith("_") or private.MARK in getattr(attribute, "__dict__", {})


def _role_method(cls: type, name: str) -> Any:
    def call(self: VerlRole, payload: Payload = ((), {})) -> Any:
        return getattr(self.worker, name)(*payload[0], **payload[1])

    async def call_async(self: VerlRole, payload: Payload = ((), {})) -> Any:
        return await getattr(self.worker, name)(*payload[0], **payload[1])

    function = call_async if inspect.iscoroutinefunction(getattr(cls, name)) else call
    function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return method(dispatch=Payloads(), host=("payload",))(function)


def _call_for_ray(self: VerlRole, payload: Payload = ((), {})) -> Any:
    (function, *args), kwargs = payload
    return function(self.worker, *args, **kwargs)


_call_for_ray.__name__ = CALL
