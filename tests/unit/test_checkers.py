"""`make check` runs a type checker again as soon as something has changed that it reads, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import checkers
from tests.checkers import Checker, check

# A checker for the test: content as long as nothing is called "wrong".
COMPLAINS = """\
import pathlib, sys
sys.exit(any("wrong" in path.read_text() for path in pathlib.Path("source").rglob("*.py")))
"""
CHECKER = Checker("complains", [], ["source"])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "complains.py").write_text(COMPLAINS)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "source" / "package").mkdir(parents=True)
    (tmp_path / "source" / "package" / "one.py").write_text("1")
    return tmp_path


def _ran(project: Path) -> bool:
    content, told = check(CHECKER, project, project / "checked")
    assert content
    return "nothing has changed" not in told


def test_it_runs_when_something_changes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = project / "source" / "package" / "one.py", project / "source" / "two.py"
    assert _ran(project)
    assert not _ran(project)
    for change in (
        lambda: one.write_text("2"),
        lambda: two.write_text("2"),
        lambda: two.rename(two.with_name("three.py")),
        lambda: two.with_name("three.py").unlink(),
        lambda: (project / "pyproject.toml").write_text("strict = true"),
        lambda: monkeypatch.setattr(checkers, "_installed", lambda: ["torch-9.dist-info"]),
    ):
        change()
        assert _ran(project)
        assert not _ran(project)
    one.write_text("1")  # as it once was isn't as it was last
    assert _ran(project)


def test_a_complaint_is_repeated(project: Path) -> None:
    (project / "source" / "two.py").write_text("wrong")
    for _ in range(2):
        content, told = check(CHECKER, project, project / "checked")
        assert not content
        assert "nothing has changed" not in told
