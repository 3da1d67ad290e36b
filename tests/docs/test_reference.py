"""Reference pages list the names that the code has."""

from __future__ import annotations

import builtins
import re
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer.main
from tests.docs.blocks import PAGES, ROOT

import colocate
from colocate import Run, errors
from colocate_run.cli import app

DOCS = ROOT / "docs"
_PATH = r"\bdocs/[a-z0-9/-]+\.(md|py|yaml|json|ipynb)\b"
CONTRIBUTING, CHANGELOG = ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"


def tables(page: Path) -> dict[str, list[list[str]]]:
    """Return the rows of a page's tables by heading, with head rows; tables under one heading are joined."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            rows = found.setdefault(line.lstrip("# "), [])
        elif line.startswith("| "):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return {heading: rows for heading, rows in found.items() if rows}


def test_run_attributes_are_listed() -> None:
    listed = [
        name.partition("(")[0] for row in tables(DOCS / "first-job.md")["What a job gets"] for name in code(row[0])
    ]
    public = {field.name for field in attrs.fields(Run)} | set(vars(Run))
    assert {name for name in public if not name.startswith("_")} == {*listed} - {"run"}


def test_every_error_is_explained() -> None:
    """The error table has each class that a caller can meet, with its built-in base, and no other class."""
    there = {
        name
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.ColocateError) and hasattr(colocate, name)
    }
    rows = tables(DOCS / "reference" / "errors.md")["The error table"]
    assert there - {"ColocateError"} == {name for row in rows for name in code(row[0])}
    for row in rows:
        for name in code(row[0]):
            assert issubclass(vars(errors)[name], vars(builtins)[code(row[1])[0]])


def test_every_command_and_option_is_described() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"## colocate {name}" in text
        for parameter in command.params:
            for option in parameter.opts:
                assert parameter.param_type_name == "argument" or f"`{option}" in text, f"{name} {option}"
    for parameter in group.params:
        assert f"`{parameter.opts[0]}" in text or f"`colocate {parameter.opts[0]}" in text


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING, CHANGELOG], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Links lead to files that exist, and to headings in these."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def test_pages_named_elsewhere_are_there() -> None:
    """Code, error texts, comments, scripts and the Makefile name pages and examples by paths that exist."""
    text = subprocess.run(["git", "grep", "-InoE", _PATH], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = [line.rsplit(":", 1) for line in text.splitlines() if not line.startswith(("CHANGELOG.md", "docs/"))]
    assert len(named) > 20
    assert [(place, path) for place, path in named if not (ROOT / path).exists()] == []


def test_the_index_has_every_page() -> None:
    """The table of contents has each page for users, and the table of the internals each page of their folder."""
    internals = DOCS / "internals"
    users = [page for page in PAGES if page.is_relative_to(DOCS) and not page.is_relative_to(internals)]
    for index, pages in ((DOCS / "README.md", users), (internals / "README.md", internals.glob("*.md"))):
        text = index.read_text(encoding="utf-8")
        names = [page.relative_to(index.parent).as_posix() for page in pages]
        assert [name for name in names if f"({name})" not in text] == ["README.md"]


def test_the_comparison_with_others() -> None:
    """The README compares colocate with plain Ray and verl, and the table of contents doesn't."""
    heading = "Beside others"
    compared = tables(ROOT / "README.md")[heading]
    assert {"plain Ray", "verl", "colocate"} <= {*compared[0]}
    assert heading not in (DOCS / "README.md").read_text(encoding="utf-8")


def test_the_changelog_has_this_version() -> None:
    """The changelog has this version, or the version is in development."""
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert colocate.__version__ in headings or ".dev" in colocate.__version__


def test_contributing_references_exist() -> None:
    """The tests, make targets, commands and functions that CONTRIBUTING names exist."""
    named = code(CONTRIBUTING.read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "core").rglob("*.py"))
    for each in named:
        if each.startswith("make "):
            assert f"\n{each.removeprefix('make ')}:" in makefile, each
        elif each.startswith(("tests/", "docs/", ".github/")) and "<" not in each:
            assert (ROOT / each).exists(), each
        elif each.startswith("python -m tests."):
            module = each.split()[2].replace(".", "/")
            assert (ROOT / f"{module}.py").exists(), each
        elif each.isidentifier() and each not in ("make",):
            assert re.search(rf"^(?:def|class) {each}\b|^{each} = |^    def {each}\b", source, re.MULTILINE), each


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("OOM", "out-of-memory.md"),
        ("Resume", "first-job.md"),
        ("custom reward function", "rollouts.md"),
        ("own config", "verl.md"),
    ],
)
def test_common_search_words_are_headings(words: str, page: str) -> None:
    headings = re.findall(r"^##? (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert any(words in heading for heading in headings)


def test_an_engine_generates() -> None:
    """Pages about clusters don't use the word engine: an engine generates answers."""
    about = ["calls", "cli", "dask", "detached-pools", "operations", "ownership", "ray", "restart", "testing"]
    found = {}
    for name in [*about, "internals/chaos", "where", "write-an-executor"]:
        prose = re.sub(
            r"^```.*?^```$|`[^`\n]*`", "", (DOCS / f"{name}.md").read_text(encoding="utf-8"), flags=re.M | re.S
        )
        found[name] = re.findall(r".*\bengines?\b.*", prose, re.IGNORECASE)
    assert {name: lines for name, lines in found.items() if lines} == {}


def code(cell: str) -> list[str]:
    """Return the code spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_field_notes_have_tests() -> None:
    for rows in tables(DOCS / "internals" / "field-notes.md").values():
        for name, file in (code(row[-1]) for row in rows[1:]):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
