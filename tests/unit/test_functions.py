"""`group.run`: the record of a function for observers."""

from __future__ import annotations

import pytest

import colocate
from colocate import Context
from colocate.testing.probes.plain import Echo


def rank(ctx: Context) -> int:
    return ctx.rank


def test_observed() -> None:
    """A function is observed as a call of no role, with spans of the ranks that answered, and the ranks that raised."""
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
