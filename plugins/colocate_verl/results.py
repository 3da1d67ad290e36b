"""What verl's callers hold of a call: one result per rank, which `ray.get`, `await` and `asyncio.gather` take."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from colocate import Call
from colocate.errors import CapabilityError


class OnDriver:
    """What means something on the driver only, and none of Ray's functions but `ray.get`."""

    __slots__ = ()


class Result(OnDriver):
    """One rank's result of a call. It says that its class is `ray.ObjectRef`, as verl asks by `isinstance`."""

    __slots__ = ("_call", "_index", "_keeps")

    def __init__(self, call: Call[Any], index: int, keeps: object) -> None:
        self._call = call
        self._index = index
        self._keeps = keeps  # whose workers end when nobody holds them

    def _class(self) -> Any:
        import ray

        return ray.ObjectRef

    __class__: Any = property(_class)

    def value(self, timeout: float | None = None) -> Any:
        """Wait for it."""
        return self._call.result(timeout)[self._index]

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from self._call.__await__())[self._index]

    def __repr__(self) -> str:
        return f"<result of {self._call!r} on rank {self._index}>"

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"{self!r} lives with its driver and can't be sent to a Ray task or actor: send ray.get(it)"
        )


class Put(Result):
    """A value that verl has put into Ray's object store to send it: it is sent when a call takes it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self, timeout: float | None = None) -> Any:
        """Return it."""
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield

    def __repr__(self) -> str:
        return f"<a {type(self._value).__name__} that was put>"


class WorkerName:
    """A worker's name, where the worker itself can't be called: in processes that are not its driver."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name != "__ray_call__":
            raise AttributeError(name)
        raise CapabilityError(
            f"{name} of worker {self._name}: only the driver of a worker group on colocate can call it"
        )

    def __repr__(self) -> str:
        return f"<name of worker {self._name}>"


def is_result(value: Any) -> bool:
    """Return whether it is one of ours, and not Ray's."""
    return issubclass(type(value), Result)


def get(refs: Any, timeout: float | None, get_of_ray: Any) -> Any:
    """As `ray.get`, of ours and Ray's, alone and mixed."""
    if is_result(refs):
        return refs.value(timeout)
    if not isinstance(refs, Sequence) or not any(map(is_result, refs)):
        return get_of_ray(refs, timeout=timeout)
    rest = iter(
        get_of_ray([each for each in refs if not is_result(each)], timeout=timeout)
        if not all(map(is_result, refs))
        else ()
    )
    return [each.value(timeout) if is_result(each) else next(rest) for each in refs]
