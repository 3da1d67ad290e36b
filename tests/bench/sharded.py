"""Models in shards: a PPO step beside the same by hand, and what an exception on one rank costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.bench.faults import EXECUTORS
from tests.bench.rows import Row

import colocate
from colocate._role.context import derive_seed
from colocate.testing.probes.trainers import Renewing
from colocate_ppo.task import Task

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-fsdp2.yaml"
_BY_HAND = Path(__file__).with_name("ppo_by_hand.py")
_ROUNDS, _STEPS, _FIRST = 5, 24, 4
_WARM = ["job.with.warm_up_steps=150", "job.with.steps=0"]
_CHANGES = [
    *("job.with.warm_up_steps=150", f"job.with.steps={_STEPS}", "job.with.critic_only_steps=0"),
    *("+job.with.eval_every=1000", "job.with.checkpoint_every=1000"),
]
_SAME = ("reward", "kl", "value_loss", "policy_loss")
_FAILURES = 7

Rows = Sequence[Mapping[str, float]]


def rows() -> Iterator[Row]:
    """Both parts."""
    yield from _beside_by_hand()
    for name, options in EXECUTORS.items():
        with colocate.connect(name, **options) as runtime:
            for kind in ("ddp", "fsdp2"):
                yield from _after_an_exception(name.capitalize(), runtime, kind)


def _beside_by_hand() -> Iterator[Row]:
    """In turns, each from the same checkpoint."""
    part = "a step of ppo.train, actor and critic under FSDP2 on 2 slots"
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        _train(Path(folder), _WARM, resume=False)
        kept = Path(folder, "runs")
        ours, by_hand = [], []
        for number in range(_ROUNDS):
            place = Path(folder, str(number))
            shutil.copytree(kept, place / "runs")
            checkpoint = next(place.glob("runs/*/checkpoints/step-000000"))
            plain = _by_hand(checkpoint)
            found = _train(place, _CHANGES, resume=True)
            _compare(found, plain)
            ours.append(_median(found))
            by_hand.append(_median(plain))
    yield Row(part, "by hand, with torchrun", min(by_hand) * 1e3, "ms")
    yield Row(part, "with colocate", min(ours) * 1e3, "ms")
    yield Row(part, "ratio", statistics.median(a / b for a, b in zip(ours, by_hand, strict=True)), "x", 1.02)


def _train(folder: Path, changes: Sequence[str], resume: bool) -> Rows:
    """Run the job; its rows, with the seconds of each step, from one drawing of problems to the next."""
    begun: list[float] = []
    draw = Task.draw

    def drawn(task: Task, count: int) -> Any:
        begun.append(time.perf_counter())
        return draw(task, count)

    config = colocate.load_config(_EXAMPLE, set=list(changes))
    with contextlib.chdir(folder), colocate.launch(config) as launched:
        Task.draw = drawn  # type: ignore[method-assign]
        try:
            record = launched.run(quiet=True, resume=resume)
        finally:
            Task.draw = draw  # type: ignore[method-assign]
    logged = [row for row in record.metrics if row["step"] > 0]
    begun = begun[-len(logged) :]
    # The last step ends with an evaluation and a checkpoint: its time says nothing.
    seconds = [*(end - start for start, end in itertools.pairwise(begun)), float("nan")][: len(logged)]
    return [{**row, "seconds": took} for row, took in zip(logged, seconds, strict=True)]


def _by_hand(checkpoint: Path) -> Rows:
    """Run the loop by hand from a checkpoint."""
    config = colocate.load_config(_EXAMPLE, set=_CHANGES)
    assert config.job is not None
    job, roles = config.job.with_, config.groups["policy"].roles
    held_out = Task("spell_backward", job["task_options"], seed=config.seed).held_out(256)
    options = {
        "task": "spell_backward",
        "task_options": job["task_options"],
        "seed": config.seed,
        "steps": job["steps"],
        "batch": job["batch"],
        "minibatch": job["minibatch"],
        "longest": max(map(len, held_out.answers)) + 2,
        "actor_ramp": job["actor_ramp"],
        "actor_lr": roles["actor"].with_["lr"],
        "critic_lr": roles["critic"].with_["lr"],
        "phrases": roles["actor"].with_["phrases"],
    }
    seeds = [derive_seed(config.seed, "policy", "actor", rank) for rank in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(_BY_HAND), str(checkpoint), json.dumps(options), json.dumps(seeds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: Rows = json.loads(done.stdout.splitlines()[-1])
    return found


def _compare(ours: Rows, by_hand: Rows) -> None:
    """The same work, or the ratio says nothing."""
    assert len(ours) == len(by_hand)
    for mine, other in zip(ours[:_FIRST], by_hand[:_FIRST], strict=True):
        for name in _SAME:
            assert abs(mine[name] - other[name]) < 1e-4 + 1e-3 * abs(other[name]), (name, mine, other)


def _median(rows: Rows) -> float:
    return statistics.median(row["seconds"] for row in rows[_FIRST:-1])


def _after_an_exception(title: str, runtime: colocate.Runtime, kind: Literal["ddp", "fsdp2"]) -> Iterator[Row]:
    """From the begin of a step in which a rank raises in its backward pass to the end of the next good one."""
    part = f"{title}: exception on one rank to the next successful step, {kind.upper()}, above a step"
    with runtime.reserve(2) as pool:
        trainer = pool.spawn({"trainer": colocate.role(Renewing, kind)}).role("trainer", Renewing)
        steps, failures = [], []
        for number in range(2 * _FAILURES):
            began = time.perf_counter()
            if number % 2:
                error = trainer.step.submit(number, 1, "backward").exception()
                assert isinstance(error, colocate.RoleError), error
            trainer.step(number)
            (failures if number % 2 else steps).append(time.perf_counter() - began)
    step = statistics.median(steps)
    yield Row(part, f"median of {_FAILURES}", (statistics.median(failures) - step) * 1e3, "ms")
    yield Row(part, "the slowest", (max(failures) - step) * 1e3, "ms", 1000.0)
