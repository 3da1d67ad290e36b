"""`colocate plan` beside what the roles of the same config hold in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import Forks

import colocate

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FEW = [
    *(f"job.with.{name}={value}" for name, value in {"warm_up_steps": 1, "steps": 1, "batch": 8}.items()),
    *(f"job.with.{name}={value}" for name, value in {"eval_problems": 8, "minibatch": 8}.items()),
]


def planned(file: Path, changes: list[str], forks: Forks | None) -> dict[str, dict[str, int]]:
    """What the command says of each role, by kind; without forks it is one that begins by itself."""
    command = ["plan", str(file), "--json", *(part for change in changes for part in ("--set", change))]
    if forks is not None:
        done = forks.run(command, Path.cwd(), os.environ)
    else:
        begin = [sys.executable, "-W", "error", "-m", "colocate"]
        done = subprocess.run([*begin, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (group,) = json.loads(done.stdout)
    return {role["role"]: role["kinds"] for role in group["roles"]}


@pytest.mark.parametrize(
    ("example", "changes"),
    [
        ("ppo.yaml", []),
        ("ppo-fsdp2.yaml", []),
        ("ppo-fsdp2.yaml", ["groups.policy.roles.actor.with.parallel=ddp"]),
    ],
    ids=["whole", "shards", "copies"],
)
def test_what_is_planned_is_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks, example: str, changes: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = colocate.load_config(EXAMPLES / example, set=[*FEW, *changes])
    with colocate.launch(config) as launched:
        (memory,) = launched.run(quiet=True).memory
    plan = planned(EXAMPLES / example, changes, forks if changes else None)
    for role in memory.slots[0].roles:
        if role.role:
            held = {kind: size for kind, size in role.device.items() if kind not in ("tensors", "residents")}
            said = {kind: size for kind, size in plan[role.role].items() if kind != "tensors"}
            assert said == held, role.role
