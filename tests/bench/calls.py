"""The cost of a call that does nothing, with threads and with processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from tests.bench.measure import side_by_side
from tests.bench.rows import Row

import colocate
from colocate.testing.probes.plain import Echo

_PART = "a call that does nothing"
_SLOTS = (1, 4)
_BARS = {"threads": (60.0, 20.0), "processes": (150.0, 60.0)}


def rows() -> Iterator[Row]:
    for kind, (first, further) in _BARS.items():
        with ExitStack() as stack:
            runtime = stack.enter_context(colocate.connect("local", processes=kind == "processes"))
            calls = {}
            for slots in _SLOTS:
                pool = stack.enter_context(runtime.reserve(slots=slots))
                group = pool.spawn({"echo": colocate.role(Echo)})
                calls[str(slots)] = group.role("echo", Echo).noop
            timed = side_by_side(calls, rounds=60, calls=50)
        one, several = (timed[str(slots)].least * 1e6 for slots in _SLOTS)
        yield Row(_PART, f"{kind}, 1 slot", one, "µs", first)
        yield Row(_PART, f"{kind}, each further slot", (several - one) / (_SLOTS[1] - 1), "µs", further)
