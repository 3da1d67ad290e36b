"""A signal at each place of the framework's frames on the main thread: nothing hangs, tears or stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from tests.signals.program import HANDLERS, OPERATIONS

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 280.0
# One of so many places: in `make test` for two handlers that stand for the two kinds, in `make suites` for all.
SAMPLE = {"threads": 197, "processes": 307}
ALL = {"threads": 3, "processes": 29}


def run(module: str, arguments: Sequence[object]) -> str:
    """What a program of this folder prints; it ends with an error, or with the stacks of all threads, if it isn't 0."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.signals.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":")},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
    )
    assert done.returncode == 0, f"{' '.join(map(str, arguments))}\n{done.stdout[-2000:]}{done.stderr[-20000:]}"
    return done.stdout


def tried(operations: Iterable[str], engine: str, handler: str, share: int, of: int) -> list[int]:
    """At how many places of each operation there was a signal."""
    return [int(count) for count in run("program", [",".join(operations), engine, handler, share, of]).split()]


@pytest.mark.in_make_test("interrupt", "keep")
@pytest.mark.parametrize("handler", ["interrupt", "keep", "close"])
def test_sample_on_threads(handler: str) -> None:
    """Some of the places."""
    assert len(tried(OPERATIONS, "threads", handler, 0, SAMPLE["threads"])) == len(OPERATIONS)


def test_sample_on_processes() -> None:
    """Some of the places."""
    assert len(tried(["spawn", "call", "close"], "processes", "interrupt", 0, SAMPLE["processes"])) == 3


@pytest.mark.long
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_all(engine: str, operation: str, handler: str) -> None:
    """Every third place on threads; fewer on processes, where a run takes longer and the main thread does the same."""
    share = list(HANDLERS).index(handler) % ALL[engine]  # other places for each handler
    assert len(tried([operation], engine, handler, share, ALL[engine])) == 1
