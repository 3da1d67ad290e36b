"""Replacements for the Ray references and actor handles that verl's callers get, and patches of Ray's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import ray

from colocate import Call
from colocate.errors import CapabilityError

from .roles import CALL, Payload

if TYPE_CHECKING:
    from .driver import Workers


class OnDriver:
    """Base class of objects that only their own driver can use. `ray.wait`, `kill` and `cancel` refuse the objects."""

    def __reduce__(self) -> Any:
        raise CapabilityError(f"{self!r} lives with its driver and can't be sent to a Ray task or actor")


class Result(OnDriver):
    """The result of a call on one rank. Its `__class__` is `ray.ObjectRef`, because verl checks with `isinstance`."""

    def __init__(self, call: Call[Any] | Future[Any], index: int, keeps: object = None) -> None:
        self._call: Any = call
        self._index = index
        self._keeps = keeps  # Workers without references end, so keep a reference.

    __class__: Any = property(lambda _: ray.ObjectRef)

    def wait_value(self, timeout: float | None = None) -> Any:
        """Return the value after waiting up to `timeout` seconds."""
        return self._call.result(timeout)[self._index]

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from self._call.__await__())[self._index]

    def __repr__(self) -> str:
        return f"<result {self._index} of {self._call!r}>"


@attrs.define(eq=False)
class WorkerHandle(OnDriver):
    """A handle of one worker, for `handle.method.remote(...)`. Only the driver that made the handle can use methods."""

    of: Workers | None  # The group's workers; None outside the driver.
    rank: int
    name: str

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("_") and name != "__ray_call__":
            raise AttributeError(f"{self!r} has no {name}")
        if self.of is None:
            raise CapabilityError(f"{name} of {self!r}: only the driver of a worker group can call it")
        method = CALL if name == "__ray_call__" else name
        return SimpleNamespace(remote=functools.partial(self._call_worker, self.of, method))

    def _call_worker(self, workers: Workers, method: str, /, *args: Any, **kwargs: Any) -> Result:
        return Result(
            workers.submit_call(workers.outer, method, [resolve_arguments(args, kwargs)], [self.rank]), 0, workers
        )

    def __repr__(self) -> str:
        return f"<worker {self.name} of a worker group on colocate>"

    def __reduce__(self) -> Any:
        return WorkerHandle, (None, self.rank, self.name)


def resolve_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Payload:
    """Replace results among one rank's arguments by the results' values, as Ray does for actors."""
    return tuple(map(_resolve_value, args)), {key: _resolve_value(value) for key, value in kwargs.items()}


def _resolve_value(given: Any) -> Any:
    if isinstance(given, ray.ObjectRef):  # This is also true for a `Result`.
        return ray.get(given)
    from verl.protocol import DataProtoFuture  # pyright: ignore[reportMissingImports]

    return given.get() if isinstance(given, DataProtoFuture) else given


def _is_own_result(value: Any) -> bool:
    return issubclass(type(value), Result)


def _get_results(get_of_ray: Callable[..., Any], refs: Any, *, timeout: float | None = None, **options: Any) -> Any:
    """Get results of Ray, results of colocate, or a mixed list of both, like `ray.get`."""
    if _is_own_result(refs):
        return refs.wait_value(timeout)
    if not isinstance(refs, Sequence) or not any(map(_is_own_result, refs)):
        return get_of_ray(refs, timeout=timeout, **options)
    ray_refs = [ref for ref in refs if not _is_own_result(ref)]
    rest = iter(get_of_ray(ray_refs, timeout=timeout, **options) if ray_refs else ())
    return [ref.wait_value(timeout) if _is_own_result(ref) else next(rest) for ref in refs]


def _put_values(data_list: Sequence[Any], max_workers: int | None = None) -> list[Result]:
    """Replace verl's `parallel_put`. The data is sent later, with the call that gets the result as an argument."""
    assert len(data_list) > 0, "data_list must not be empty"  # verl has the same error text.
    done = Future[Sequence[Any]]()
    done.set_result(data_list)
    return [Result(done, index) for index in range(len(data_list))]


def _refuse_own(of_ray: Callable[..., Any], name: str, subject: Any, *args: Any, **options: Any) -> Any:
    for ref in subject if isinstance(subject, list | tuple) else (subject,):
        if issubclass(type(ref), OnDriver):
            instead = "use ray.get, await or asyncio.gather; workers end when nobody holds them, and by ray.shutdown"
            raise CapabilityError(f"ray.{name} can't be given {ref!r}, which is colocate's: {instead}")
    return of_ray(subject, *args, **options)


def _shut_down_ray(shutdown_of_ray: Callable[..., None], end: Callable[[], None], *args: Any, **options: Any) -> None:
    end()
    shutdown_of_ray(*args, **options)


def patch_ray(end: Callable[[], None]) -> None:
    """Patch Ray's functions to accept or refuse `OnDriver` objects; `ray.shutdown` begins with a call of `end`."""
    import verl.utils.ray_utils  # pyright: ignore[reportMissingImports]

    verl.utils.ray_utils.parallel_put = _put_values
    if isinstance(ray.get, functools.partial):
        return
    ray.get, ray.shutdown = (
        functools.partial(_get_results, ray.get),
        functools.partial(_shut_down_ray, ray.shutdown, end),
    )
    for name in ("wait", "kill", "cancel"):
        setattr(ray, name, functools.partial(_refuse_own, getattr(ray, name), name))
