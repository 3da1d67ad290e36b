"""verl by a user's own config: the page's example, and trainers that can't run without Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "verl_own.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "COLOCATE_VERL"}
pytestmark = pytest.mark.skipif(os.environ.get("COLOCATE_VERL", "local") != "local", reason="it says so: local")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )


@pytest.mark.timeout(900)
def test_example_resumes_with_own_reward(tmp_path):
    """The example trains with its own reward, and a second run resumes from the newest checkpoint."""
    text = EXAMPLE.read_text()
    body = next(line for line in text.splitlines() if line.startswith("    return 1.0 if"))
    (tmp_path / "verl_own.py").write_text(text.replace(body, "    return 0.25 if ground_truth.isdigit() else 9.0"))
    first, second = run(tmp_path, "verl_own.py", "1"), run(tmp_path, "verl_own.py", "2")
    assert first.returncode == second.returncode == 0, (first.stderr + second.stderr)[-3000:]
    assert "Training from scratch" in first.stdout
    assert "Setting global step to 1" in second.stdout
    assert re.findall(r"^step:(\d)", first.stdout + second.stdout, re.MULTILINE) == ["1", "2"]
    scores = re.findall(r"critic/score/(?:mean|max|min):(?:np\.float\d+\()?([\d.]+)", first.stdout + second.stdout)
    assert [float(score) for score in scores] == [0.25] * 6


REFUSED = """
import os, sys
from pathlib import Path
from colocate_verl.demo import ENVIRONMENT, make, of_v0, settings
os.environ.update(ENVIRONMENT)
import colocate_verl
from colocate_verl.driver import ENGINE
colocate_verl.install("local")
import verl.experimental.reward_loop as loop, verl.trainer.ppo.ray_trainer as v0
theirs = {"RewardLoopManager": (loop, loop.RewardLoopManager), "LLMServerManager": (v0, v0.LLMServerManager)}
make(Path(), 1)
trainer = of_v0(settings("v0", Path().absolute(), 1))
for name in sys.argv[1:]:
    setattr(theirs[name][0], name, theirs[name][1])
try:
    trainer.init_workers()
finally:
    print("connected:", ENGINE._runtime is not None)
"""


@pytest.mark.parametrize("names", [("RewardLoopManager",), ("LLMServerManager",)])
def test_ray_actors_of_verls_where_there_is_no_ray(tmp_path, names):
    """Without Ray, verl's Ray actors are refused by name before a worker starts."""
    done = run(tmp_path, "-c", REFUSED, *names)
    assert f".{names[0]} would start Ray actors, and there is no Ray" in done.stderr, done.stderr[-3000:]
    assert "CapabilityError: RayPPOTrainer on 'local'" in done.stderr
    assert done.stdout.endswith("connected: False\n")
