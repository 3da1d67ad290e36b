"""A role object made outside any worker answers as a view of one rank, so algorithm code runs without an executor."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import attrs

from colocate._role.call import Call, Resident, ResidentSpec, T_co, ended
from colocate._role.context import (
    CallState,
    Context,
    attach,
    reset_current,
    running_call,
    set_current,
    standalone_context,
)
from colocate._role.method_spec import MethodSpec
from colocate._system.numbers import limit
from colocate._values.dispatch import chosen_ranks, plan
from colocate._values.leaving import describe, ordinary, tensor_bytes
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import ClosedError, DispatchError

_ONE = Ranks(1, {"": Mesh({"dp": 1})})


@attrs.frozen
class StandaloneCall:
    """A role method of a standalone object: dispatch and collect apply, everything runs at once, errors come bare."""

    _instance: Any
    _spec: MethodSpec

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        spec, instance = self._spec, self._instance
        arguments = {
            name: given.fetch() if isinstance(given, LocalResident) else given
            for name, given in spec.bind(args, kwargs).items()
        }
        planned = plan(spec.dispatch, arguments, _ONE, None)
        ctx: Context | None = getattr(instance, "_colocate_ctx", None)
        if ctx is None:
            ctx = standalone_context(type(instance).__name__)
            attach(instance, ctx)
        token, call_token = set_current(ctx), running_call.set(CallState(0, valid_rows=planned.valid[0]))
        try:
            result = spec.call(instance, dict(planned.arguments[0]))
            result = awaited(result) if spec.is_async else result
        finally:
            running_call.reset(call_token)
            reset_current(token)
        ranks = attrs.evolve(_ONE, rows=planned.valid, padded=planned.padded)
        return spec.collect.join([ordinary(result)], ranks)

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Run it at once; the call is done when it returns."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        try:
            return ended(label, self(*args, **kwargs))
        except Exception as error:
            return ended(label, error=error)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run it at once; the resident holds the collected value itself."""
        return LocalResident(self(*args, **kwargs))

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> StandaloneCall:
        """Return the same: there is one rank, and nothing to wait for."""
        if ranks is not None and (named := list(chosen_ranks(ranks))) != [0]:
            raise DispatchError(f"ranks={named}: a role object outside any worker has rank 0 only")
        return self


class LocalResident(Resident[T_co]):
    """The resident of a role object outside any worker: it is the value."""

    def __init__(self, value: T_co) -> None:
        self._value: T_co | None = value
        self._freed = False

    @property
    def ref(self) -> T_co:
        """The value itself."""
        return self.fetch()

    @property
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes."""
        return ResidentSpec(describe(self._value), (tensor_bytes(self._value),), (None,))

    def wait(self, timeout: float | None = None) -> None:
        """It is there."""
        limit(timeout, "wait(timeout)")
        self.fetch()

    def fetch(self, timeout: float | None = None) -> T_co:
        """The value itself."""
        limit(timeout, "fetch(timeout)")
        if self._freed:
            raise ClosedError("this resident was freed")
        return cast("T_co", self._value)

    def free(self) -> None:
        """Let go of it."""
        self._value, self._freed = None, True


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; also where a loop runs already, as in a notebook, which then waits."""
    import asyncio  # takes a tenth of a driver's start, and most have none

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # Not `asyncio.run`, after which this thread would have no current loop: that is role code's.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, "colocate-standalone") as thread:
        return thread.submit(context.run, asyncio.run, coroutine).result()
