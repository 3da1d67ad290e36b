"""Both type checkers report the errors that this folder marks with `# E:`, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)
MARK = "# E:"

Findings = dict[tuple[str, int], str]


def wanted() -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MARK in line
    }


def mypy() -> Findings:
    found: Findings = {}
    for line in _run("mypy", f"--config-file={HERE / 'mypy.ini'}", "--cache-dir", os.devnull, "--output=json").splitlines():
        item = json.loads(line)
        if item["severity"] == "error":
            found[Path(item["file"]).name, item["line"]] = f"{item['message']} [{item['code']}]"
    return found


def pyright() -> Findings:
    answer: dict[str, Any] = json.loads(_run("pyright", "--outputjson"))
    assert answer["summary"]["filesAnalyzed"] == len(FILES)
    return {
        (Path(item["file"]).name, item["range"]["start"]["line"] + 1): f"{item['message']} [{item.get('rule')}]"
        for item in answer["generalDiagnostics"]
        if item["severity"] in ("error", "warning")
    }


def _run(*command: str) -> str:
    env = {"PYRIGHT_PYTHON_CACHE_DIR": str(Path(sys.prefix) / "pyright"), **os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, *map(str, FILES)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1, f"{command[0]} found no errors or broke:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checker_reports_the_wanted_errors_and_no_others(checker: Callable[[], Findings]) -> None:
    found = checker()
    expected = wanted()
    missed = sorted(expected - found.keys())
    unwanted = [f"{place[0]}:{place[1]}: {text}" for place, text in sorted(found.items()) if place not in expected]
    assert not missed, f"{checker.__name__} doesn't report what is wanted at {missed}"
    assert not unwanted, f"{checker.__name__} reports what isn't wanted:\n" + "\n".join(unwanted)
