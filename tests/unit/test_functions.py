"""`group.run`: how functions travel, and what observers are told."""

from __future__ import annotations

import functools

import pytest

import colocate
from colocate import Context
from colocate.features.functions.driver import _ship
from colocate.testing.probes.numbers import draw_there
from colocate.testing.probes.plain import Echo


def rank(ctx: Context) -> int:
    return ctx.rank


def test_by_name() -> None:
    """What a worker can import goes by its name, with its distribution's version or as a module whose source travels.

    Anything else goes with the call.
    """
    shipped = _ship(draw_there, "draw_there", in_process=False)
    assert (shipped.name, shipped.data) == ("colocate.testing.probes.numbers:draw_there", None)
    assert shipped.distribution == "colocate"
    assert shipped.load() is draw_there
    shipped = _ship(rank, "rank", in_process=False)
    assert (shipped.name, shipped.distribution, shipped.cls) == (f"{__name__}:rank", None, None)
    assert shipped.load() is rank
    renamed = functools.partial(draw_there)
    functools.update_wrapper(renamed, draw_there)
    assert _ship(renamed, "it", in_process=False).cls is renamed
    assert _ship([1, 2].index, "index", in_process=False).load()(2) == 1  # its name alone is the bare function's


def test_observed() -> None:
    """As a call of no role: how long it took is told of all ranks that had answered, and which of them have raised."""
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
    (record,) = told
    assert (record.role, record.method, record.raised) == ("", "fail", (1,))
    assert 1 in record.ranks
    assert [each for each, _, _ in record.spans] == list(record.ranks)
    assert all(end >= start > 0 for _, start, end in record.spans)
