"""A GRPO step whose answers wait for tools half of the time: with `staleness: 1` beside `staleness: 0`.

The example's job runs with an engine of its own, whose role waits for so many turns of a tool before it answers, as an
environment with tools does. How long a turn takes is decided once, by a run without any.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bench.rows import Row

import colocate
from colocate_ppo.model import small_llama
from colocate_ppo.task import Problems, Task
from colocate_ppo.tokenizer import character_tokenizer
from colocate_rollout.role import EngineRole

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "grpo.yaml"
_TURNS = 4
_STEPS = 24
_SKIPPED = 4  # of these, at the start: what is imported and compiled then
# Each answer is used twice: what waits for the engine's own work still is the rest of the step.
_JOB = {"warm_up_steps": 0, "steps": _STEPS, "epochs": 2, "eval_problems": 8}
_JOB |= {"eval_every": 10**6, "checkpoint_every": 10**6}


class Tools(EngineRole):
    """An engine behind tools."""

    def __init__(self, turn_s: float, **options: Any) -> None:
        super().__init__("transformers", **options)
        self.turn_s = turn_s

    def _rows(self, *asked: Any) -> Iterator[Any]:
        for _ in range(_TURNS):
            time.sleep(self.turn_s)
        yield from super()._rows(*asked)


def rows() -> Iterator[Row]:
    """The steps are timed from one to the next, in rounds: first without tools, then with, then ahead."""
    turn_s = _step_s(0.0, 0) / _TURNS  # then tools are half of the time
    ratios = []
    for _ in range(3):
        waiting, ahead = _step_s(turn_s, 0), _step_s(turn_s, 1)
        ratios.append(ahead / waiting)
    part = "GRPO step, half of it waiting for tools"
    yield Row(part, "processes, staleness: 1 beside 0", statistics.median(ratios), "x", 0.7)


def _step_s(turn_s: float, staleness: int) -> float:
    fields = small_llama(character_tokenizer(_phrases()), 2, 64, 4, 128).to_dict()
    model = {name: value for name, value in fields.items() if isinstance(value, int | str)}
    role = {"use": f"{__name__}:Tools", "with": {"turn_s": turn_s, "model": model, "max_length": 64}}
    changes = [f"groups.policy.roles.rollout={role | {'background': bool(staleness)}}"]
    changes += [f"+job.with.{name}={value}" for name, value in {**_JOB, "staleness": staleness}.items()]
    config = colocate.load_config(_EXAMPLE, set=[*changes, "executor={use: local, with: {processes: true}}"])
    begun: list[float] = []
    draw = Task.draw

    def drawn(task: Task, count: int) -> Problems:
        begun.append(time.perf_counter())
        return draw(task, count)

    with (
        mock.patch.object(Task, "draw", drawn),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        colocate.launch(config) as launched,
    ):
        launched.run(quiet=True)
    return statistics.median([end - start for start, end in pairwise(begun[_SKIPPED:])])


def _phrases() -> Any:
    config = colocate.load_config(_EXAMPLE)
    return config.groups["policy"].roles["actor"].with_["phrases"]
