"""The job `ppo.train` learns, its control with shuffled rewards doesn't, and a resumed run continues its curve."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest

import colocate
from colocate_ppo.job import train

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TINY = [
    "groups.policy.roles.actor.with={layers: 1, hidden: 16, heads: 2, feed_forward: 32, warm_up_lr: 1e-2, lr: 1e-3}",
    "job.with={task_options: {min_word_len: 3, max_word_len: 3}, warm_up_steps: 6, warm_up_batch: 8, steps: 6,"
    " batch: 16, minibatch: 8, epochs: 2, critic_only_steps: 2, eval_every: 2, eval_problems: 16, checkpoint_every: 2}",
]
# Words of three letters are learned in seconds.
EASY = [
    "job.with.task_options={min_word_len: 3, max_word_len: 3}",
    "job.with.warm_up_steps=200",
    "+job.with.flawed=0.75",
]
TRAINED = [*EASY, "job.with.steps=15", "job.with.eval_every=15"]


@attrs.define(eq=False)
class Recorder:
    """A stand-in for the job's run, which asks the job to stop after `stop_after` checks."""

    runtime: colocate.Runtime
    groups: Mapping[str, colocate.ColocatedGroup]
    directory: Path
    resumed: Path | None = None
    stop_after: int | None = None
    rows: list[dict[str, float]] = attrs.field(factory=list)
    tables: dict[str, list[dict[str, str]]] = attrs.field(factory=dict)
    asked: int = 0

    @property
    def stopping(self) -> bool:
        self.asked += 1
        return self.stop_after is not None and self.asked > self.stop_after

    def is_due(self, step: int, every: int = 0) -> bool:
        return every > 0 and step % every == 0

    def log(self, step: int, **scalars: float) -> None:
        self.rows.append({"step": step, **scalars})

    def total(self, steps: int) -> None:
        assert steps >= 0

    def progress(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    def show(self, title: str, rows: Iterable[dict[str, str]]) -> None:
        self.tables[title] = list(rows)

    def timed(self, phase: str) -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        directory = self.directory / f"{step}"
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        self.resumed = directory


def run(example: str, changes: Iterable[str], directory: Path, **how: Any) -> Recorder:
    config = colocate.load_config(EXAMPLES / example, set=list(changes))
    assert config.job is not None
    with colocate.launch(config) as job:
        recorder = Recorder(job.runtime, job.groups, directory, **how)
        train(recorder, **config.job.with_)  # type: ignore[arg-type]
    return recorder


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Run the small example's warm-up."""
    return run("ppo-small.yaml", [*EASY, "job.with.steps=0"], tmp_path_factory.mktemp("warmed"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Run the job too briefly to learn anything."""
    return run("ppo-small.yaml", TINY, tmp_path_factory.mktemp("tiny"))


@pytest.mark.long
def test_ppo_improves(warmed: Recorder, tmp_path: Path) -> None:
    trained = run("ppo-small.yaml", TRAINED, tmp_path, resumed=warmed.resumed)
    assert warmed.rows[0]["eval_accuracy"] < 0.35
    assert trained.rows[-1]["eval_accuracy"] > 0.65
    assert trained.rows[-1]["reward"] > trained.rows[0]["reward"] + 0.2
    (table,) = trained.tables.values()
    better = [row["after"] == row["right"] for row in table]
    assert sum(better) > sum(row["before"] == row["right"] for row in table)


def test_nothing_in_between(tmp_path: Path) -> None:
    """With `eval_every` and `checkpoint_every` at 0 the job evaluates first and last, and saves only at the end."""
    changes = [*TINY, "job.with.eval_every=0", "job.with.checkpoint_every=0"]
    recorder = run("ppo-small.yaml", changes, tmp_path)
    assert [row["step"] for row in recorder.rows if "eval_accuracy" in row] == [0, 6]
    assert [each.name for each in tmp_path.iterdir()] == ["6"]


@pytest.mark.long
def test_shuffled_rewards_keep_accuracy_low(warmed: Recorder, tmp_path: Path) -> None:
    """With shuffled rewards the accuracy stays low."""
    changes = [*TRAINED, "job.with.shuffle_rewards=true"]
    control = run("ppo-small.yaml", changes, tmp_path, resumed=warmed.resumed)
    assert control.rows[-1]["eval_accuracy"] < 0.35


def test_every_step_is_logged(tiny: Recorder) -> None:
    rows = tiny.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    wanted = {"reward", "kl", "policy_loss", "value_loss", "entropy"}
    assert all(wanted <= row.keys() for row in rows[1:])
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 6]
    # The actor waits for the critic, and is equal to the reference until the third step's update.
    assert [abs(row["kl"]) > 1e-7 for row in rows[1:]] == [False, False, False, True, True, True]


@pytest.mark.in_make_test("true")
@pytest.mark.parametrize("waits", ["true", "false"])
def test_stopped_run_resumes_with_same_numbers(tiny: Recorder, tmp_path: Path, waits: str) -> None:
    """A run stopped in its warm-up and again in PPO resumes with the same numbers."""
    changes = [*TINY, f"+job.with.checkpoint_waits={waits}"]
    first = run("ppo-small.yaml", changes, tmp_path, stop_after=3)
    second = run("ppo-small.yaml", changes, tmp_path, stop_after=8, resumed=first.resumed)
    third = run("ppo-small.yaml", changes, tmp_path, resumed=second.resumed)
    assert first.rows == []
    assert [row["step"] for row in second.rows] == [0, 1, 2, 3]
    assert [*second.rows, *third.rows] == tiny.rows
    assert third.tables == tiny.tables


@pytest.mark.parametrize("change", ["seed=1", "+job.with.shuffle_rewards=true"])
def test_another_seed_gives_another_curve_and_so_do_shuffled_rewards(
    tiny: Recorder, tmp_path: Path, change: str
) -> None:
    assert run("ppo-small.yaml", [*TINY, change], tmp_path).rows != tiny.rows


def test_unknown_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        colocate.ConfigError, match=r"job\.with\.group: must name the group to train in; the config has policy"
    ):
        run("ppo-small.yaml", [*TINY, "job.with.group=polcy"], tmp_path)


@pytest.mark.parametrize("example", ["ppo.yaml", "ppo-small.yaml", "ppo-fsdp2.yaml"])
def test_the_examples_have_no_mistakes(example: str) -> None:
    config = colocate.load_config(EXAMPLES / example)
    assert set(config.groups["policy"].roles) == {"actor", "critic", "reference", "reward"}


def test_shards_on_threads_are_refused_before_anything_starts() -> None:
    changes = ["executor.with.processes=false"]
    with pytest.raises(colocate.ConfigError, match=r"line 20: .*role 'actor' makes process groups of its 2 ranks"):
        colocate.load_config(EXAMPLES / "ppo-fsdp2.yaml", set=changes)


def test_listing_the_plugin_imports_no_torch() -> None:
    script = (
        "import sys; from colocate_ppo import plugin; plugin.colocate_roles(); plugin.colocate_jobs(); "
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"
