"""verl's unchanged trainers, with engines on the CPU, have the losses of verl's own worker groups."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from colocate_verl.demo import NAMES, settings

EXECUTOR = os.environ.get("COLOCATE_VERL", "local")
ITS_RAY = ["gcs_server", "raylet"] if EXECUTOR == "ray" else []
BY_VERL: dict[str, dict[str, Any]] = {}


def demo(folder: Path, trainer: str, executor: str, *options: str) -> dict[str, Any]:
    out = folder / f"{trainer}-{executor}.json"
    command = [sys.executable, "-W", "ignore", "-m", "colocate_verl.demo", "--trainer", trainer, "--executor", executor]
    environment = {name: value for name, value in os.environ.items() if name != "COLOCATE_VERL"}
    with tempfile.TemporaryDirectory(prefix="verl", dir="/tmp") as temporary:  # verl leaves checkpoint locks there.
        environment["TMPDIR"] = temporary
        done = subprocess.run(
            [*command, *options, "--out", str(out)], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    run: dict[str, Any] = json.loads(out.read_text())
    return run | {"printed": done.stdout}


def by_verl(folder: Path, trainer: str) -> dict[str, Any]:
    """Return a run of verl's own worker groups, made once for all tests."""
    if trainer not in BY_VERL:
        BY_VERL[trainer] = demo(folder, trainer, "verl")
    return BY_VERL[trainer]


def losses(run: dict[str, Any], trainer: str) -> list[list[float]]:
    return [[step[name] for name in NAMES["sft" if trainer == "sft" else "ppo"]] for step in run["steps"]]


def assert_equal(run: dict[str, Any], other: dict[str, Any], trainer: str) -> None:
    for mine, its in zip(losses(run, trainer), losses(other, trainer), strict=True):
        assert mine == pytest.approx(its, abs=1e-5, rel=0)


@pytest.mark.timeout(900)
class TestTrainers:
    @pytest.mark.parametrize("trainer", ["v0", "v1"])
    def test_ppo_comes_to_the_same(self, tmp_path, trainer):
        """Losses and gradient norms of three PPO steps equal verl's own, and only on Ray a Ray is started."""
        if trainer == "v1" and EXECUTOR != "ray":
            pytest.skip("V1's data is in Ray actors")
        run = demo(tmp_path, trainer, EXECUTOR)
        assert_equal(run, by_verl(tmp_path, trainer), trainer)
        assert run["ray"] == ITS_RAY

    def test_sft_comes_to_the_same_and_goes_on(self, tmp_path):
        """The SFT trainer's losses equal verl's own, and a resumed run repeats the last step's losses."""
        run = demo(tmp_path, "sft", EXECUTOR)
        assert_equal(run, by_verl(tmp_path, "sft"), "sft")
        assert losses({"steps": run["again"]}, "sft") == losses(run, "sft")[-1:]
        assert run["ray"] == ITS_RAY

    def test_a_critic_that_sleeps(self, tmp_path):
        """A critic sleeps while the actor trains: all its bytes are freed, and the losses are unchanged."""
        run = demo(tmp_path, "v0", EXECUTOR, "--sleep")
        assert_equal(run, by_verl(tmp_path, "v0"), "v0")
        assert run["asleep_bytes"] > 900_000  # 80,000 weights in float32, and Adam's two moments of each
        assert run["left_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--trainer", "v1", "--executor", "dask"], "TransferQueue, which is Ray actors: --executor ray or verl"),
        (["--trainer", "sft", "--executor", "local", "--sleep"], "--sleep: for v0 and v1, which have a critic"),
        (["--trainer", "v0", "--executor", "verl", "--sleep"], "not on verl's own worker groups"),
        (["--trainer", "v0", "--executor", "local", "--steps", "1"], "give at least 2"),
        (["--trainer", "v0", "--executor", "dsak"], "'dsak'"),
        (["--trainer", "v0", "--executor", "local", "--set", "steps"], "--set steps: say KEY=VALUE"),
        (["--trainer", "v0", "--executor", "local", "--set", "data.batch=1"], "Could not override 'data.batch'"),
    ],
)
def test_wrong_options_are_refused(options, told):
    """The demo refuses a wrong option with exit code 2 and the reason."""
    command = [sys.executable, "-m", "colocate_verl.demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_a_config_of_ones_own(tmp_path, trainer):
    """A user's settings apply, also for keys that verl's config lacks, and other settings are unchanged."""
    new = {"data.train_batch_size": 4, "actor_rollout_ref.rollout.custom.weights": "elsewhere"}
    before, after = settings(trainer, tmp_path, 2), settings(trainer, tmp_path, 2, {**new, "+trainer.mine": 1})
    assert (after.data.train_batch_size, after.trainer.mine) == (4, 1)
    assert after.actor_rollout_ref.rollout.custom.weights == "elsewhere"
    assert after.actor_rollout_ref.model == before.actor_rollout_ref.model
