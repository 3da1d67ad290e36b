"""Timing on a machine with other load."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen


@frozen
class Rounds:
    """The median of each round. Functions that were timed together share their rounds."""

    medians: Sequence[float]

    @property
    def least(self) -> float:
        """The median of the least disturbed round: other load can only add time."""
        return min(self.medians)

    def over(self, other: Rounds) -> float:
        """Return the ratio of these times to the other's: the median of the rounds' own ratios."""
        return statistics.median(mine / its for mine, its in zip(self.medians, other.medians, strict=True))


def side_by_side(functions: Mapping[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, Rounds]:
    """Time functions in turns, after a warm-up round: a disturbance of one round then affects all functions."""
    medians: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            median = median_s(function, calls)
            if number:
                medians[name].append(median)
    return {name: Rounds(found) for name, found in medians.items()}


def median_s(function: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextlib.contextmanager
def asking(command: Sequence[str], **env: str) -> Iterator[Callable[..., str]]:
    """Start a process; yield a function that sends it a line, if given, and returns the next line of its output.

    `env` is added to this process's environment. The process ends with the block.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **env}, text=True, **pipes) as process:  # type: ignore[call-overload]

        def ask(line: str | None = None) -> str:
            if line is not None:
                print(line, file=process.stdin, flush=True)
            answer: str = process.stdout.readline()
            assert answer, f"{command[:3]} has ended"
            return answer.strip()

        yield ask
        process.communicate()
    assert process.returncode == 0, process.returncode
