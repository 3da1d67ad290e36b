"""The cost of calls, beside an earlier commit that didn't send them on the caller's own thread.

Two drivers (`asked.py`) are asked in turns, and time the calls on their main threads. The earlier commit comes from
this repository's history.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.bench.measure import asking
from tests.bench.rows import Row

_BEFORE = "34e180a"
_PART = f"calls beside {_BEFORE}"
_ROUNDS = 15
# The calls, and for each kind of slots the largest allowed ratio to the earlier commit.
_BARS = {
    "no-op, 1 slot": {"threads": 0.35, "processes": 0.45},
    "each further slot": {"threads": 0.35, "processes": 0.35},
    "keep, until it returns": {"threads": 0.3, "processes": 0.3},
    "a pipeline of 7": {"threads": 0.5, "processes": 0.45},
}


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="colocate-") as folder:
        if not (there := _taken_out(_BEFORE, Path(folder))):
            return
        for kind in ("threads", "processes"):
            with ExitStack() as stack:
                old, new = (stack.enter_context(_driver(kind, path)) for path in (there, ()))
                taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (*_BARS, "4 slots")}
                for _ in range(_ROUNDS):
                    for name in taken:
                        if name != "each further slot":
                            for found, ask in zip(taken[name], (old, new), strict=True):
                                found.append(ask(name))
                several = zip(taken["each further slot"], taken["4 slots"], taken["no-op, 1 slot"], strict=True)
                for each, fours, ones in several:
                    each += [(four - one) / 3 for four, one in zip(fours, ones, strict=True)]
                for name, bars in _BARS.items():
                    was, now = map(statistics.median, taken[name])
                    yield Row(_PART, f"{name}, {kind}", now / was, "x", bars[kind])
                if kind == "processes":
                    yield Row(_PART, "a no-op of another group while 256 MB are sent", new("beside") * 1e3, "ms", 5.0)


@contextlib.contextmanager
def _driver(kind: str, path: Sequence[str]) -> Iterator[Callable[[str], float]]:
    """Start a driver; yield a function that asks it for the seconds of a call."""
    command = [sys.executable, "-P", "-u", str(Path(__file__).with_name("asked.py")), kind]
    with asking(command, PYTHONPATH=os.pathsep.join(path)) as ask:
        core = ask()
        if path and core != path[0]:  # a commit compared with itself would give a plausible ratio
            raise RuntimeError(f"colocate of {path[0]} was to be measured, but it was that of {core}")
        yield lambda name: float(ask(name))


def _taken_out(commit: str, folder: Path) -> list[str]:
    """Extract an earlier commit into a folder; return its import path, empty if the commit isn't in this history."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "archive", commit, "core", "executors"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        return []
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return [str(folder / name) for name in ("core", "executors")]
