"""Programs of a few files, run as a user runs them: a script, and modules beside it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import Forks

EXECUTORS = {
    "threads": "colocate.connect('local')",
    "strict": "colocate.connect('local', strict=True)",
    "processes": "colocate.connect('local', processes=True)",
    "ray": "colocate.connect('ray', cpus=2)",
    "dask": "colocate.connect('dask', cpus=2)",
}
BUILT_IN = ("threads", "processes")

HEAD = "import colocate\nfrom colocate import Role, method\n"

Program = Callable[..., str]


@pytest.fixture(params=[*BUILT_IN, *(pytest.param(name, marks=pytest.mark.long) for name in ("strict", "ray", "dask"))])
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def program(tmp_path: Path, forks: Forks) -> Program:
    """Return a function that writes a script and its files, runs it elsewhere, and returns its output.

    The script runs in a fork of a process with colocate imported, or in the given interpreter.
    """

    def run(script: str, executor: str = "processes", code: int = 0, python: str | None = None, **files: str) -> str:
        folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            file = folder / (name.replace("__in__", "/") + ".py")
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(text)
        main = folder / "main.py"
        main.write_text(HEAD + script.replace("CONNECT", EXECUTORS[executor]))
        if python is None:
            done = forks.run((), elsewhere, os.environ, main, strict=False)
        else:
            done = subprocess.run([python, main], cwd=elsewhere, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    return run
