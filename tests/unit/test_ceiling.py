"""What `make check` says of the size of core: what is above its ceiling, by package."""

from __future__ import annotations

from pathlib import Path

from tests import ceiling

CODE = '''"""A docstring."""

# a comment
def f(a: int) -> int:
    """Another one."""
    return (
        a + 1
    )
'''


def test_what_is_counted(tmp_path: Path) -> None:
    """Lines with code and their tokens: no comment, docstring or empty line."""
    file = tmp_path / "a.py"
    file.write_text(CODE)
    assert ceiling.size_of([file]) == ceiling.Size(4, 4.0, 1)


def test_packages(tmp_path: Path) -> None:
    """Packages below `colocate` are a row each with all that is below them, its own modules one; the suites none."""
    for name in (
        "colocate/__init__",
        "colocate/errors",
        "colocate/worker/a",
        "colocate/worker/b/c",
        "colocate/testing/x",
        "colocate_run/d",
    ):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    found = {name: size.lines for name, size in ceiling.packages(tmp_path).items()}
    assert found == {"colocate": 2, "colocate/worker": 2, "colocate_run": 1}


def test_above() -> None:
    """Each number has a ceiling, and a package without one is above it."""
    table = {"a": ceiling.Size(10, 7.5, 3)}
    assert ceiling.read(ceiling.written(table)) == table
    assert ceiling.above(table, table) == []
    for more in (ceiling.Size(11, 7.5, 3), ceiling.Size(10, 7.6, 3), ceiling.Size(10, 7.5, 4)):
        [words] = ceiling.above({"a": more}, table)
        assert "raise it in the same commit with its reason" in words
    assert len(ceiling.above({"b": ceiling.Size(1, 1.0, 1)}, table)) == 3
