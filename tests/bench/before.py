"""What calls cost beside the commit from before they were sent by the caller's own thread.

Two drivers are asked in turns (`asked.py`), and what is asked for runs on their main threads. The commit before is
taken out of this repository's history.
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
# What is asked for, on each kind of slots; the most that it may be of what it was.
_BARS = {
    "no-op, 1 slot": {"threads": 0.35, "processes": 0.45},
    "each further slot": {"threads": 0.35, "processes": 0.35},
    "keep, until it returns": {"threads": 0.3, "processes": 0.3},
    "a pipeline of 7": {"threads": 0.5, "processes": 0.45},
}


def rows() -> Iterator[Row]:
    """The ratios; and what another group's no-op waits for while 256 MB are sent."""
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
    """What asks a driver how long something takes, in seconds."""
    command = [sys.executable, "-P", "-u", str(Path(__file__).with_name("asked.py")), kind]
    with asking(command, PYTHONPATH=os.pathsep.join(path)) as ask:
        core = ask()
        if path and core != path[0]:  # a ratio of a commit to itself would look like a number
            raise RuntimeError(f"colocate of {path[0]} was to be measured, but it was that of {core}")
        yield lambda name: float(ask(name))


def _taken_out(commit: str, folder: Path) -> list[str]:
    """The import path of an earlier commit, put into a folder; empty where its history isn't here."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "archive", commit, "core", "executors"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        return []
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return [str(folder / name) for name in ("core", "executors")]
