"""Remove a feature, and test the rest: `python -m tests.without [FEATURE...]`.

A copy of the tree lacks the feature's folder and its row; the suite on threads has to pass. Another feature's test that
needs the feature is skipped with the feature's name, and listed at the end.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "executors", "plugins")
TESTS = ("tests/conformance/test_threads.py",)


def copy_without(feature: str, folder: Path) -> None:
    """Copy the tree to a folder, without a feature."""
    for name in (*PACKAGES, "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    core = folder / "core" / "colocate"
    shutil.rmtree(core / "features" / feature)
    shutil.rmtree(folder / "tests" / "suite" / feature)
    table = core / "features" / "__init__.py"
    table.write_text(_without_row(table.read_text(encoding="utf-8"), feature), encoding="utf-8")


def _without_row(text: str, feature: str) -> str:
    """Return the table of features without a row."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == feature:
                    lines = text.splitlines(keepends=True)
                    del lines[key.lineno - 1 : value.end_lineno]
                    return "".join(lines)
    raise AssertionError(f"the table has no row {feature!r}")


def run(feature: str, *options: str) -> tuple[int, str]:
    """Run the tests without a feature; return pytest's exit code and output."""
    with tempfile.TemporaryDirectory(prefix="colocate-without-") as name:
        folder = Path(name)
        copy_without(feature, folder)
        paths = ":".join(str(folder / each) for each in PACKAGES)
        python = ["env", "-u", "TMPDIR", f"PYTHONPATH={paths}", sys.executable]
        lacks = f"from colocate.features import FEATURES; assert {feature!r} not in FEATURES"
        subprocess.run([*python, "-c", lacks], cwd=folder, check=True)  # the tests will import the copy
        command = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", *options, *TESTS]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return found.returncode, found.stdout + found.stderr


def skipped_for(feature: str, printed: str) -> list[str]:
    """Return the places of tests that were skipped for the lack of a feature."""
    return re.findall(rf"^SKIPPED \[\d+\] (\S+): feature '{feature}' isn't here", printed, re.MULTILINE)


def main() -> int:
    """Remove features, one at a time; return the worst exit code of the tests."""
    from colocate.features import FEATURES

    worst = 0
    for feature in sys.argv[1:] or FEATURES:
        code, printed = run(feature)
        print(f"without {feature}: {printed.strip().splitlines()[-1]}")
        print("".join(f"  skipped, as it needs {feature}: {each}\n" for each in skipped_for(feature, printed)), end="")
        if code:
            print(printed)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
