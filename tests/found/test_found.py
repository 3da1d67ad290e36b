"""Small programs that went wrong once, each run as a user would: `python tests/found/NAME.py MODE` prints a verdict.

A script's docstring says what must hold, and in which modes the script runs: "Modes: threads, strict, processes, ray,
dask.".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
# The scripts that still fail, and why.
WRONG: dict[str, str] = {}


def _runs() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.py")):
        if found := re.search(r"^Modes: (.*)\.$", path.read_text(), re.MULTILINE):
            why = WRONG.get(path.name)
            marks = () if why is None else pytest.mark.xfail(strict=True, raises=AssertionError, reason=why)
            yield from (pytest.param(path.name, mode, marks=marks) for mode in found[1].split(", "))


@pytest.mark.long
@pytest.mark.parametrize(("script", "mode"), [*_runs()])
def test_found(script: str, mode: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / script), mode], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
