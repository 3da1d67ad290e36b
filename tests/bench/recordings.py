"""The cost of recording and profiling a step of the demos, the bytes written, and the first answer of a replayed role.

Every other step of a job, or every other few steps, is recorded or profiled, and compared with both neighbours.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.bench.rows import Row

import colocate
from colocate import Role, method
from colocate_run.run import Run

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
_COST, _PROFILE, _REPLAY = "recording rollouts and rewards", "profiling a PPO step", "replaying a role of 1 GB"
# The recorded roles, and the steps per recording: its start and end count for a run, not for a step.
_RECORDED = {"ppo": (("actor", "reward"), 1), "grpo": (("rollout", "reward"), 5)}
_JOB = {"warm_up_steps": 5, "eval_every": 10**6, "checkpoint_every": 10**6}
_PPO = ["job.with.critic_only_steps=0"]
_PARTS, _PROFILED_STEPS, _FIRST = 61, 31, 3
_ROUNDS = 7
_SIZE = 2**28  # numbers of four bytes


class Big(Role):
    """A role with a gigabyte of weights, which leaves a mark when it is constructed."""

    def __init__(self, marks: str) -> None:
        (Path(marks) / str(time.time_ns())).touch()
        self.weights = torch.ones(_SIZE)

    @method
    def answer(self, number: int) -> float:
        return float(self.weights[number])


class Empty(Role):
    @method
    def answer(self, number: int) -> float:
        return 1.0


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in _RECORDED:
            yield from _recording(name, Path(folder))
        yield from _profile()
        yield from _replay(Path(folder))


def _train(name: str, steps: int, changes: Sequence[str], between: Callable[[Run, int], object]) -> list[Any]:
    """Run a demo's job, call `between` after each step, and return the logged steps."""
    log = Run.log

    def logged(run: Run, step: int, **scalars: float) -> None:
        log(run, step, **scalars)
        between(run, step)

    given = [*changes, *(f"+job.with.{key}={value}" for key, value in {**_JOB, "steps": steps}.items())]
    config = colocate.load_config(_EXAMPLES / f"{name}.yaml", set=given)
    with mock.patch.object(Run, "log", logged), colocate.launch(config) as launched:
        return [row for row in launched.run(quiet=True).metrics if row["step"] > 0]


def _beside_neighbours(found: Sequence[float]) -> float:
    """Return the median ratio of every other value to the mean of its two neighbours."""
    return statistics.median(2 * found[at] / (found[at - 1] + found[at + 1]) for at in range(1, len(found) - 1, 2))


def _recording(name: str, folder: Path) -> Iterator[Row]:
    """Measure CPU time in one process: a step's recording is written before the step counts as over."""
    roles, each = _RECORDED[name]
    spent: list[float] = []
    began, recorders = 0.0, list[colocate.Recorder]()

    def between(run: Run, step: int) -> None:
        nonlocal began
        if step % each == 0:
            while recorders:
                recorders.pop().close()
            spent.append((time.process_time() - began) / each)
            number = step // each
            if number % 2 and number < _PARTS:
                views = [run.groups["policy"][role] for role in roles]
                recorders.append(run.runtime.record(views, folder / f"{name}-{number}"))
            began = time.process_time()

    _train(name, _PARTS * each, _PPO if name == "ppo" else [], between)
    parts = spent[-_PARTS + _FIRST - 1 :]  # the first and the last one aren't recorded
    yield Row(_COST, f"{name.upper()}, CPU time of a step", statistics.median(parts[::2]) * 1e3, "ms")
    yield Row(_COST, f"{name.upper()}, that with recording", _beside_neighbours(parts), "x", 1.03)
    files = values = pickled = 0
    for path in folder.glob(f"{name}-*"):
        files += sum(file.stat().st_size for kind in ("*.calls", "rows.jsonl") for file in path.rglob(kind))
        for role in colocate.load_recording(path).values():
            for call in role.calls:
                for rank in call._by_rank.values():
                    values += sum(document.length for document in (*rank.rows, *filter(None, [rank.end])))
                found = [row.value for row in call.rows] if call.rows else call.values()
                pickled += sum(len(pickle.dumps(value)) for value in found)
    yield Row(_COST, f"{name.upper()}, written, beside the values in it", files / values, "x", 1.05)
    yield Row(_COST, f"{name.upper()}, written, beside the same values pickled", files / pickled, "x")


def _profile() -> Iterator[Row]:
    profiles: list[colocate.Profile] = []
    spent: list[float] = []
    began, stack = 0.0, contextlib.ExitStack()

    def between(run: Run, step: int) -> None:
        nonlocal began
        spent.append(_worker_s(run) - began)
        stack.close()
        if step % 2 and step < _PROFILED_STEPS:
            profiles.append(stack.enter_context(colocate.profile(run.groups["policy"])))
        began = _worker_s(run)

    logged = _train("ppo", _PROFILED_STEPS, [*_PPO, "executor.with.processes=true"], between)
    seconds = [sum(row["seconds"].values()) for row in logged]
    sums = [float(each.rows()[-1]["time (s)"]) for each in profiles]
    apart = [abs(its / step - 1) for its, step in zip(sums, seconds[1::2], strict=True)]
    yield Row(_PROFILE, "sum of its parts, apart from the time in the log", statistics.median(apart) * 100, "%", 2)
    steps = spent[-_PROFILED_STEPS + _FIRST - 1 :]
    yield Row(_PROFILE, "the worker's CPU time of a step", statistics.median(steps[::2]) * 1e3, "ms")
    yield Row(_PROFILE, "that with a profile", _beside_neighbours(steps), "x", 1.15)


def _worker_s(run: Run) -> float:
    """Return the CPU time of the one worker so far."""
    (worker,) = (node for node in _nodes(run.runtime.graph.data()) if node["kind"] == "worker")
    fields = Path(f"/proc/{worker['pid']}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for each in node["children"]:
        yield from _nodes(each)


def _replay(folder: Path) -> Iterator[Row]:
    """Time a spawn until the first answer, of an empty, a constructed and a replayed role."""
    marks, recorded = folder / "marks", folder / "recorded"
    marks.mkdir()
    big = colocate.role(Big, str(marks))
    until: dict[str, list[float]] = {"empty": [], "constructed": [], "replayed": []}
    answered: list[float] = []
    constructed = 0
    with colocate.connect(processes=True) as runtime, runtime.reserve(1) as pool:
        with pool.spawn({"role": big}, name="group") as group, runtime.record(group["role"], recorded):
            for number in range(2000):
                group["role"].answer(number)
        assert len([*marks.iterdir()]) == 1
        roles: dict[str, Any] = {"empty": colocate.role(Empty), "constructed": big, "replayed": big.on(replay=recorded)}
        for _ in range(_ROUNDS):
            for name, role in roles.items():
                before, began = len([*marks.iterdir()]), time.perf_counter()
                with pool.spawn({"role": role}, name="group") as group:
                    spawned = time.perf_counter()
                    assert group["role"].answer(0) == [1.0]
                    until[name].append(time.perf_counter() - began)
                    if name == "replayed":
                        answered.append(time.perf_counter() - spawned)
                        constructed += len([*marks.iterdir()]) - before
    beyond = [its - bare for its, bare in zip(until["replayed"], until["empty"], strict=True)]
    yield Row(_REPLAY, "until its first answer, constructed", statistics.median(until["constructed"]) * 1e3, "ms")
    yield Row(_REPLAY, "the same, replayed", statistics.median(until["replayed"]) * 1e3, "ms")
    yield Row(_REPLAY, "of which more than with an empty role", statistics.median(beyond) * 1e3, "ms", 100)
    yield Row(_REPLAY, "of which after the spawn", statistics.median(answered) * 1e3, "ms")
    yield Row(_REPLAY, "times that it is constructed", constructed, "", 0)
