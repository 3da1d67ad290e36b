"""Timing on a machine that does other things too."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import frozen


@frozen
class Rounds:
    """The median of each round. Functions that were timed together share their rounds."""

    medians: Sequence[float]

    @property
    def least(self) -> float:
        """The median of the least disturbed round: what else runs on the machine can only add to it."""
        return min(self.medians)

    def over(self, other: Rounds) -> float:
        """How many times as long as the other it takes: the median of the rounds' own ratios."""
        return statistics.median(mine / its for mine, its in zip(self.medians, other.medians, strict=True))


def side_by_side(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Rounds]:
    """Time functions in turns, so that what disturbs one round disturbs all of them in it.

    Args:
        functions: The functions by name.
        rounds: How often it is each one's turn, after one turn to warm up.
        calls: How often it is called in a turn.
        clock: In seconds.

    Returns:
        The medians of the rounds by name.
    """
    medians: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            median = statistics.median(_times(function, calls, clock))
            if number:
                medians[name].append(median)
    return {name: Rounds(found) for name, found in medians.items()}


def _times(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> list[float]:
    times = []
    for _ in range(calls):
        start = clock()
        function()
        times.append(clock() - start)
    return times


def taken_out(commit: str, folder: Path) -> list[str]:
    """The import path of an earlier commit, put into a folder; empty where its history isn't here."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "archive", commit, "core", "executors"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        return []
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return [str(folder / name) for name in ("core", "executors")]
