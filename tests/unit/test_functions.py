"""`group.run`: how functions travel."""

from __future__ import annotations

import functools
import threading

import pytest

import colocate
from colocate import Context, PipelineError, SerializationError
from colocate._views.functions import _ship
from colocate.testing.probes.meshes import facts
from colocate.testing.probes.plain import Echo


def rank(ctx: Context) -> int:
    return ctx.rank


def test_by_name() -> None:
    """A function that a worker can import goes by its name, with the version of its distribution."""
    shipped = _ship(facts, "facts", in_process=False)
    assert shipped.name == "colocate.testing.probes.meshes:facts"
    assert (shipped.data, shipped.distribution) == (None, "colocate")
    assert shipped.load() is facts


def test_beside() -> None:
    """One of a module that isn't installed goes by its name, too: the module's source travels."""
    shipped = _ship(rank, "rank", in_process=False)
    assert (shipped.name, shipped.distribution, shipped.cls) == (f"{__name__}:rank", None, None)
    assert shipped.load() is rank


def test_as_it_is() -> None:
    """What a worker can't import, or isn't what its name leads to, goes with the call."""
    renamed = functools.partial(facts)
    functools.update_wrapper(renamed, facts)
    for function in (lambda ctx: ctx.rank, functools.partial(facts, b=1), renamed):
        assert _ship(function, "it", in_process=False).cls is function


def test_bound_method() -> None:
    """A bound method takes its object along: its name alone leads to the bare function."""
    shipped = _ship([1, 2].index, "index", in_process=False)
    assert shipped.load()(2) == 1


def test_in_process() -> None:
    """Within one process it is handed over as it is; what holds something that can't be sent is refused elsewhere."""
    lock = threading.Lock()

    def function(ctx: Context) -> bool:
        return lock.locked()

    assert _ship(function, "function", in_process=True).load() is function
    with colocate.connect(strict=True) as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        with pytest.raises(SerializationError, match="function function: the variable lock of function"):
            group.run(function)


def test_refused_in_a_pipeline() -> None:
    """It would wait for its results, which a pipeline keeps from coming."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        with group.pipeline(), pytest.raises(PipelineError, match=r"group\.run\(rank\) would wait"):
            group.run(rank)
        assert group.run(rank) == [0]


def test_a_failed_call_observed() -> None:
    """How long it took is told of all ranks that had answered, and which of them have raised."""
    told: list[colocate.CallRecord] = []

    class Observer:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told.append(record)

    def fail(ctx: Context) -> None:
        if ctx.rank:
            raise ValueError("on purpose")

    with colocate.connect() as runtime, runtime.reserve(2) as pool:
        runtime.observe(Observer())
        with pytest.raises(colocate.RoleError):
            pool.spawn({"echo": colocate.role(Echo)}).run(fail)
    assert 1 in told[0].ranks
    assert told[0].raised == (1,)
    assert [rank for rank, _, _ in told[0].spans] == list(told[0].ranks)
    assert all(end >= start > 0 for _, start, end in told[0].spans)


def test_observed() -> None:
    """Observers are told of it as of a call of no role."""
    told: list[colocate.CallRecord] = []

    class Observer:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told.append(record)

    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        runtime._node.services.observers.add(Observer())
        pool.spawn({"echo": colocate.role(Echo)}).run(rank)
    assert [(record.role, record.method, record.ranks, record.error) for record in told] == [("", "rank", (0,), None)]
