"""Models in shards: a PPO step beside the same by hand, and what an exception on one rank costs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from tests.bench.faults import EXECUTORS
from tests.bench.measure import asking
from tests.bench.rows import Row
from tests.suite.probes.trainers import Renewing

import colocate
from colocate._role.context import derive_seed
from colocate_ppo.task import Task

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-fsdp2.yaml"
_BY_HAND = Path(__file__).with_name("ppo_by_hand.py")
_ROUNDS, _STEPS, _FIRST = 5, 40, 4
_WARM = ["job.with.warm_up_steps=150", "job.with.steps=0"]
_CHANGES = [
    *("job.with.warm_up_steps=150", f"job.with.steps={_STEPS}", "job.with.critic_only_steps=0"),
    *("+job.with.eval_every=1000", "job.with.checkpoint_every=1000"),
]
_SAME = ("reward", "kl", "value_loss", "policy_loss")
_FAILURES = 7

Rows = Sequence[Mapping[str, float]]


def rows() -> Iterator[Row]:
    yield from _beside_by_hand()
    for name, options in EXECUTORS.items():
        with colocate.connect(name, **options) as runtime:
            for kind in ("ddp", "fsdp2"):
                yield from _after_an_exception(name.capitalize(), runtime, kind)


def _beside_by_hand() -> Iterator[Row]:
    """Step by step in turns, both from the same checkpoint: the speed of a machine may drift within seconds."""
    part = "a step of ppo.train, actor and critic under FSDP2 on 2 slots"
    ours: list[float] = []
    by_hand: list[float] = []
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        _train(Path(folder), _WARM)
        for number in range(_ROUNDS):
            place = Path(folder, str(number))
            shutil.copytree(Path(folder, "runs"), place / "runs")
            with _by_hand(next(place.glob("runs/*/checkpoints/step-000000"))) as step:
                metrics, seconds, plain = _train_in_turns(place, step)
            _compare(metrics, plain)
            ours += seconds[_FIRST:]
            by_hand += [row["seconds"] for row in plain[_FIRST : len(seconds)]]
    ratios = [mine / other for mine, other in zip(ours, by_hand, strict=True)]  # of steps made right after each other
    yield Row(part, "by hand, with torchrun", statistics.median(by_hand) * 1e3, "ms")
    yield Row(part, "with colocate", statistics.median(ours) * 1e3, "ms")
    yield Row(part, "ratio", statistics.median(ratios), "x", 1.02)


def _train(folder: Path, changes: Sequence[str], resume: bool = False) -> Rows:
    config = colocate.load_config(_EXAMPLE, set=list(changes))
    with contextlib.chdir(folder), colocate.launch(config) as launched:
        record = launched.run(quiet=True, resume=resume)
    return [row for row in record.metrics if row["step"] > 0]


def _train_in_turns(folder: Path, by_hand: Callable[[], Mapping[str, float]]) -> tuple[Rows, Sequence[float], Rows]:
    """Go on from the checkpoint; before each step the loop by hand makes its own.

    Returns:
        What the job logs of its steps, and their seconds, without the last: that ends with a checkpoint. And what the
        loop by hand says of its own.
    """
    seconds: list[float] = []
    plain: list[Mapping[str, float]] = []
    began: list[float] = []
    draw = Task.draw

    def drawn(task: Task, count: int) -> Any:  # each step begins with that
        if began:
            seconds.append(time.perf_counter() - began[-1])
        plain.append(by_hand())
        began.append(time.perf_counter())
        return draw(task, count)

    with mock.patch.object(Task, "draw", drawn):
        return _train(folder, _CHANGES, resume=True), seconds, plain


@contextlib.contextmanager
def _by_hand(checkpoint: Path) -> Iterator[Callable[[], Mapping[str, float]]]:
    """What has the loop by hand make a step from a checkpoint on: of each its metrics, and its seconds."""
    config = colocate.load_config(_EXAMPLE, set=_CHANGES)
    assert config.job is not None
    job, roles = config.job.with_, config.groups["policy"].roles
    held_out = Task("spell_backward", job["task_options"], seed=config.seed).held_out(256)
    options = {
        "task": "spell_backward",
        **{name: job[name] for name in ("task_options", "steps", "batch", "minibatch", "actor_ramp")},
        "seed": config.seed,
        "longest": max(map(len, held_out.answers)) + 2,
        "actor_lr": roles["actor"].with_["lr"],
        "critic_lr": roles["critic"].with_["lr"],
        "phrases": roles["actor"].with_["phrases"],
    }
    seeds = [derive_seed(config.seed, "policy", "actor", rank) for rank in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(_BY_HAND), str(checkpoint), json.dumps(options), json.dumps(seeds)]
    with asking(command, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path)) as ask:
        ask()
        yield lambda: json.loads(ask(""))


def _compare(ours: Rows, by_hand: Rows) -> None:
    """The same work, or the ratio says nothing."""
    assert len(ours) == len(by_hand)
    for mine, other in zip(ours[:_FIRST], by_hand[:_FIRST], strict=True):
        for name in _SAME:
            assert abs(mine[name] - other[name]) < 1e-4 + 1e-3 * abs(other[name]), (name, mine, other)


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
