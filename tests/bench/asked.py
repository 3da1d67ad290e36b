"""A driver that says how long things take in it: `python asked.py threads|processes`, with names on its input.

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

import colocate
from colocate.testing.probes.plain import Echo

_CALLS = 200
_LARGE_BYTES = 256 << 20


def _serve(kind: str) -> None:
    """Answer on the main thread, until there is nothing more to be read."""
    print(Path(colocate.__file__).parents[1])
    roles: Any = {"echo": colocate.role(Echo)}
    with colocate.connect("local", processes=kind == "processes") as runtime:
        one, four, other = (runtime.reserve(slots=slots).spawn(roles) for slots in (1, 4, 1))
        noop, fours = one.role("echo", Echo).noop, four.role("echo", Echo).noop
        echo, beside = one.role("echo", Echo).echo, other.role("echo", Echo).noop

        def pipeline() -> None:
            with one.pipeline():
                calls = [noop.submit() for _ in range(7)]  # type: ignore[attr-defined]
            for call in calls:
                call.result()

        def waits() -> float:
            """The longest no-op of another group while a large argument is on its way."""
            sending = threading.Thread(target=lambda: echo(bytes(_LARGE_BYTES)))
            sending.start()
            longest = 0.0
            while sending.is_alive():
                longest = max(longest, _times(beside, 1))
            return longest

        timed: dict[str, Callable[[], object]] = {
            "no-op, 1 slot": noop,
            "4 slots": fours,
            "keep, until it returns": noop.keep,  # type: ignore[attr-defined]
            "a pipeline of 7": pipeline,
        }
        for line in sys.stdin:
            name = line.strip()
            if name == "beside":
                print(statistics.median(waits() for _ in range(5)))
                continue
            print(_times(timed[name], _CALLS if "pipeline" not in name else _CALLS // 5))
            noop()  # what was kept is there


def _times(call: Callable[[], object], count: int) -> float:
    """The median of so many, in seconds."""
    found: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    _serve(sys.argv[1])
