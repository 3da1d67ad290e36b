"""A driver that times its own calls: `python asked.py threads|processes`, with the calls' names on its input.

It imports nothing of the tests: colocate may be that of another commit.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import colocate
from colocate import Role, method

_CALLS = 200
_LARGE_BYTES = 256 << 20


class Plain(Role):
    @method
    def noop(self) -> None:
        """Do nothing."""

    @method
    def take(self, value: Any) -> None:
        """Take a value, and do nothing."""


def _serve(kind: str) -> None:
    """Answer requests on the main thread until the end of the input."""
    print(Path(colocate.__file__).parents[1])
    roles: Any = {"plain": colocate.role(Plain)}
    with colocate.connect("local", processes=kind == "processes") as runtime:
        one, four, other = (runtime.reserve(slots=slots).spawn(roles) for slots in (1, 4, 1))
        noop: Any
        noop, fours, beside = (group.role("plain", Plain).noop for group in (one, four, other))
        take, large = one.role("plain", Plain).take, numpy.zeros(_LARGE_BYTES // 8)

        def pipeline() -> None:
            with one.pipeline():
                calls = [noop.submit() for _ in range(7)]
            for call in calls:
                call.result()

        def waits() -> float:
            """Return the longest no-op of another group while a large argument is sent."""
            sending = threading.Thread(target=take, args=(large,))
            sending.start()
            longest = 0.0
            while sending.is_alive():
                longest = max(longest, _times(beside, 1))
            return longest

        timed: dict[str, Callable[[], object]] = {
            "no-op, 1 slot": noop,
            "4 slots": fours,
            "keep, until it returns": noop.keep,
            "a pipeline of 7": pipeline,
        }
        for line in sys.stdin:
            name = line.strip()
            if name == "beside":
                print(statistics.median(waits() for _ in range(5)))
                continue
            print(_times(timed[name], _CALLS if "pipeline" not in name else _CALLS // 5))
            noop()  # by its end the kept results have arrived


def _times(call: Callable[[], object], count: int) -> float:
    found: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    _serve(sys.argv[1])
