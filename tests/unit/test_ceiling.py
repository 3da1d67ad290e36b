"""What `make check` says of the size of the code, against a commit."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests import ceiling

CODE = '''"""A docstring."""

# a comment
def f(a: int) -> int:
    """Another one."""
    return (
        a + 1
    )
'''


def test_what_is_counted() -> None:
    """No comment, docstring or end of a line."""
    assert ceiling.count_tokens(CODE.encode()) == 16


def test_packages() -> None:
    """A file belongs to the first folder that it lies in; other files don't count."""
    names = ["core/colocate/a.py", "core/colocate/testing/b.py", "core/colocate_run/c.py", "tests/d.py"]
    files = [(name, b"x = 1\n") for name in [*names, "docs/e.py", "tests/f.txt"]]
    assert ceiling.count_by_package(files) == {"core": 3, "suites": 3, "run": 3, "tests": 3}


def test_above() -> None:
    """Packages with a limit are counted together: one may grow where another one shrinks."""
    before = dict.fromkeys(ceiling.FOLDERS.values(), 100)
    assert ceiling.above(before, before | {"core": 150, "run": 50}) == []
    [words] = ceiling.above(before, before | {"core": 150, "run": 51})
    assert words == "core + run + report: 301 tokens are more than 100 % of the base's 300: take something out"


def test_a_commit_is_read_from_git(tmp_path: Path) -> None:
    """What lies in the checkout doesn't change the base; a commit that git lacks is told with what to do."""
    module = tmp_path / "core" / "colocate" / "a.py"
    module.parent.mkdir(parents=True)
    for folder in ("executors", "plugins", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.py").write_text("x = 1\n")
    module.write_text("x = 1\n")
    commit = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"]
    for command in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    module.write_text("x = 1 + 1\n")
    (tmp_path / "tests" / "new.py").write_text("y\n")
    before = ceiling.count_by_package(ceiling.files_of_commit("HEAD", tmp_path))
    assert before == {"core": 3, "executors": 3, "plugins": 3, "tests": 3}
    assert ceiling.count_by_package(ceiling.files_of_checkout(tmp_path)) == before + Counter(core=2, tests=1)
    with pytest.raises(SystemExit, match=r"f00d can't be read from git: .*git fetch --unshallow"):
        ceiling.files_of_commit("f00d", tmp_path)
