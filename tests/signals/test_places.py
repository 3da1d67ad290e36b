"""A signal at any place of the framework's frames on the main thread hangs, breaks and leaves nothing."""

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
# One place in this many gets a signal: in `make test` for two handlers, one of each kind, in `make suites` for all.
SAMPLE = {"threads": 197, "processes": 307}
ALL = {"threads": 3, "processes": 29}


def run(module: str, arguments: Sequence[object]) -> str:
    """Run a program of this folder, and return its output; fail with the errors or stacks if the exit code isn't 0."""
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
    """Return the number of places with a signal for each operation."""
    return [int(count) for count in run("program", [",".join(operations), engine, handler, share, of]).split()]


@pytest.mark.in_make_test("interrupt", "keep")
@pytest.mark.parametrize("handler", ["interrupt", "keep", "close"])
def test_sample_on_threads(handler: str) -> None:
    """On threads, each operation survives a signal at a sample of its places."""
    assert len(tried(OPERATIONS, "threads", handler, 0, SAMPLE["threads"])) == len(OPERATIONS)


def test_sample_on_processes() -> None:
    """On processes, spawn, call and close survive Ctrl-C at a sample of their places."""
    assert len(tried(["spawn", "call", "close"], "processes", "interrupt", 0, SAMPLE["processes"])) == 3


@pytest.mark.long
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_all(engine: str, operation: str, handler: str) -> None:
    """An operation survives a signal at every third place on threads, and at every 29th on slower processes."""
    share = list(HANDLERS).index(handler) % ALL[engine]  # other places for each handler
    assert len(tried([operation], engine, handler, share, ALL[engine])) == 1
