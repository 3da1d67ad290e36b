"""A role object outside any worker acts like a view of one rank, so that algorithm code runs without an executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import attrs

from colocate._role.awaited import run_coroutine
from colocate._role.call import Call, Resident, ResidentSpec, T_co, make_finished_call
from colocate._role.context import (
    CallState,
    Context,
    attach,
    reset_current,
    running_call,
    set_current,
    standalone_context,
)
from colocate._role.method_spec import MethodSpec, no_such_attribute
from colocate._system.numbers import parse_limit
from colocate._values.dispatch import Plan, parse_ranks, plan_call
from colocate._values.leaving import count_tensor_bytes, describe_value, detach_value
from colocate._values.mesh import Ranks
from colocate.errors import ClosedError, DispatchError

_ONE = Ranks(1)


@attrs.frozen
class StandaloneCall:
    """A method of a role object outside any worker.

    Calls run at once, with dispatch and collect, and raise plain errors.
    """

    _instance: Any
    _spec: MethodSpec

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        spec, planned = self._spec, self._plan_call(args, kwargs)
        with self._enter_role(CallState(0, valid_rows=planned.valid[0])) as ctx:
            ctx.number_call(ctx._call, spec.name)
            result = spec.call(self._instance, dict(planned.arguments[0]))
            result = run_coroutine(result) if spec.is_async else result
        ranks = attrs.evolve(_ONE, rows=planned.valid, padded=planned.padded)
        return spec.collect.join([detach_value(result)], ranks)

    def _plan_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        arguments = {
            name: argument.fetch() if isinstance(argument, LocalResident) else argument
            for name, argument in self._spec.bind(args, dict(kwargs)).items()
        }
        return plan_call(self._spec.dispatch, arguments, _ONE, None)

    @contextlib.contextmanager
    def _enter_role(self, call: CallState) -> Iterator[Context]:
        """Run role code in the block, with the object's context set as the current one."""
        ctx: Context | None = getattr(self._instance, "_colocate_ctx", None)
        if ctx is None:
            ctx = standalone_context(type(self._instance).__name__)
            attach(self._instance, ctx)
        token, call_token = set_current(ctx), running_call.set(call)
        try:
            yield ctx
        finally:
            running_call.reset(call_token)
            reset_current(token)

    def __getattr__(self, name: str) -> NoReturn:
        raise no_such_attribute(f"{type(self._instance).__name__}.{self._spec.name}", name)

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Run the method at once, and return a finished call."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        try:
            return make_finished_call(label, self(*args, **kwargs))
        except Exception as error:
            return make_finished_call(label, error=error)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run the method at once, and return a resident of the collected value."""
        return LocalResident(self(*args, **kwargs))

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> StandaloneCall:
        """Return this call, because options change nothing for one rank that runs at once."""
        if ranks is not None and (named := list(parse_ranks(ranks))) != [0]:
            raise DispatchError(f"ranks={named}: a role object outside any worker has rank 0 only")
        return self


class LocalResident(Resident[T_co]):
    """A resident made by a role object outside any worker. It holds the value itself."""

    def __init__(self, value: T_co) -> None:
        self._value: T_co | None = value
        self._freed = False

    @property
    def ref(self) -> T_co:
        """The value itself."""
        return self.fetch()

    @property
    def spec(self) -> ResidentSpec:
        """Structure, shapes, dtypes and bytes of the value."""
        return ResidentSpec(describe_value(self._value), (count_tensor_bytes(self._value),), (None,))

    def wait(self, timeout: float | None = None) -> None:
        """Return at once, because the value exists already."""
        parse_limit(timeout, "wait(timeout)")
        self.fetch()

    def fetch(self, timeout: float | None = None) -> T_co:
        """Return the value itself."""
        parse_limit(timeout, "fetch(timeout)")
        if self._freed:
            raise ClosedError("this resident was freed")
        return cast("T_co", self._value)

    def free(self) -> None:
        """Drop the value."""
        self._value, self._freed = None, True
