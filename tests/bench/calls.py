"""What a call costs when the method does nothing, with threads and with processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from tests.bench.measure import side_by_side
from tests.bench.rows import Row

import colocate
from colocate.testing.probes.plain import Echo

_SLOTS = (1, 2, 4)
_BARS = {"threads": (60.0, 20.0), "processes": (150.0, 60.0)}


def rows() -> Iterator[Row]:
    """One slot, and each further one."""
    for kind, (first, further) in _BARS.items():
        with ExitStack() as stack:
            runtime = stack.enter_context(colocate.connect("local", processes=kind == "processes"))
            calls = {}
            for slots in _SLOTS:
                pool = stack.enter_context(runtime.reserve(slots=slots))
                group = pool.spawn({"echo": colocate.role(Echo)})
                calls[str(slots)] = group.role("echo", Echo).noop
            timed = side_by_side(calls, rounds=12, calls=300)
        least = {slots: timed[str(slots)].least * 1e6 for slots in _SLOTS}
        yield Row("a call that does nothing", f"{kind}, 1 slot", least[1], "µs", first)
        for slots in _SLOTS[1:]:
            added = (least[slots] - least[1]) / (slots - 1)
            yield Row("a call that does nothing", f"{kind}, each further slot (of {slots})", added, "µs", further)
