"""A role object made outside any worker answers as a view of one rank, so algorithm code runs without an executor."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from colocate._role import call
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
from colocate._role.resident import LocalResident, Resident
from colocate._values.collect import Collect
from colocate._values.dispatch import Plan, chosen_ranks, plan
from colocate._values.leaving import ordinary
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import DispatchError

_ONE = Ranks(1, {"": Mesh({"dp": 1})})


@attrs.frozen
class StandaloneCall:
    """A role method of a standalone object: dispatch and collect apply, everything runs at once, errors come bare."""

    _instance: Any
    _spec: MethodSpec

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        arguments = {name: _value(argument) for name, argument in self._spec.bind(args, kwargs).items()}
        planned = plan(self._spec.dispatch, arguments, _ONE, None)
        result = ordinary(self._run(planned))
        return join(self._spec.collect, [result], attrs.evolve(_ONE, rows=planned.valid, padded=planned.padded))

    def submit(self, /, *args: Any, **kwargs: Any) -> call.Call[Any]:
        """Run it at once; the call is done when it returns."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        try:
            return call.settled(label, self(*args, **kwargs))
        except Exception as error:
            return call.failed(label, error)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run it at once; the resident holds the collected value itself."""
        return LocalResident(self(*args, **kwargs))

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> StandaloneCall:
        """The same: there is one rank, and nothing to wait for."""
        if ranks is not None and (named := list(chosen_ranks(ranks))) != [0]:
            raise DispatchError(f"ranks={named}: a role object outside any worker has rank 0 only")
        return self

    def _run(self, planned: Plan) -> Any:
        ctx = _context_of(self._instance)
        state = CallState(0, valid_rows=planned.valid[0])
        token, call_token = set_current(ctx), running_call.set(state)
        try:
            result = self._spec.call(self._instance, dict(planned.arguments[0]))
            return awaited(result) if self._spec.is_async else result
        finally:
            running_call.reset(call_token)
            reset_current(token)


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; also where a loop runs already, as in a notebook, which then waits."""
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


def join(collect: Collect, results: Sequence[Any], ranks: Ranks) -> Any:
    """The collected value."""
    return collect.join(results, ranks)


def _value(argument: Any) -> Any:
    return argument.fetch() if isinstance(argument, LocalResident) else argument


def _context_of(instance: Any) -> Context:
    found: Context | None = getattr(instance, "_colocate_ctx", None)
    if found is None:
        found = standalone_context(type(instance).__name__)
        attach(instance, found)
    return found
