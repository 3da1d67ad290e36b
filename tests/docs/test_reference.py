"""Reference pages can't drift: what they list is what the code has."""

from __future__ import annotations

import builtins
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer.main
from tests.docs.blocks import PAGES, ROOT

import colocate
from colocate import Run, errors
from colocate._plugins.plugins import find_executor
from colocate._signatures.annotations import describe
from colocate.cli import app
from colocate.config import Config, ExecutorConfig, GroupConfig, JobConfig, PluginsConfig, PoolConfig, RoleConfig
from colocate.config.schema import key_of, keys

DOCS = ROOT / "docs"
CONTRIBUTING, CHANGELOG = ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"
SECTIONS = {
    "the config": Config,
    "executor": ExecutorConfig,
    "a pool": PoolConfig,
    "a group": GroupConfig,
    "a role": RoleConfig,
    "a job": JobConfig,
    "plugins": PluginsConfig,
}
OPTIONS = {  # where the options of each executor are
    "local": ("configuration.md", "executor"),
    "ray": ("ray.md", "A private Ray"),
    "dask": ("dask.md", "A private cluster"),
}


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The cells of the tables of a page, without their heads; those under one heading are one table."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            rows = found.setdefault(line.lstrip("# "), [])
        elif line.startswith("| "):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return {heading: rows for heading, rows in found.items() if rows}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_keys_of_a_config_are_listed(heading: str) -> None:
    """Every key with its type and its default, in the order of the schema."""
    listed = [row[:3] for row in tables(DOCS / "configuration.md")[heading] if row[0].startswith("`")]
    types_of = typing.get_type_hints(SECTIONS[heading])
    known = [
        [f"`{key_of(field.name)}`", words(types_of[field.name]), default(field)] for field in keys(SECTIONS[heading])
    ]
    assert listed[: len(known)] == known


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_an_executor_are_listed(name: str) -> None:
    """Every option with its type and its default, in the order of the signature."""
    if name != "local":
        pytest.importorskip({"dask": "distributed"}.get(name, name))
    page, heading = OPTIONS[name]
    rows = tables(DOCS / page)[heading]
    listed = [row[:3] for row in rows[[row[0] for row in rows].index("option") + 1 :]]
    connect = find_executor(name).connect
    hints = typing.get_type_hints(connect)
    parameters = inspect.signature(connect).parameters.values()
    assert listed == [[f"`{p.name}`", words(hints[p.name]), yaml_of(p.default)] for p in parameters]


def test_what_a_job_gets_is_listed() -> None:
    listed = [
        name.partition("(")[0] for row in tables(DOCS / "configuration.md")["What a job gets"] for name in code(row[0])
    ]
    public = {field.name for field in attrs.fields(Run)} | set(vars(Run))
    assert {name for name in public if not name.startswith("_")} == {*listed} - {"run"}


def test_every_error_is_explained() -> None:
    """The error table has each class that a caller can meet, and none that there isn't."""
    there = {
        name
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.ColocateError) and hasattr(colocate, name)
    }
    rows = tables(DOCS / "ownership-and-failure.md")["The error table"]
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
    """Files exist, and so do the headings in them."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def test_the_index_has_every_page() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.parent == DOCS and f"({page.name})" not in text] == ["README.md"]


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert colocate.__version__ in headings


def test_what_contributors_are_told_to_run_is_there() -> None:
    """The folders and files of tests, the targets of make, the commands, and the names of mechanisms."""
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


def words(annotation: Any) -> str:
    """A type as the pages say it."""
    if annotation is Any:
        return "anything"
    if annotation in (ExecutorConfig, JobConfig, PluginsConfig):
        return {ExecutorConfig: "an executor", JobConfig: "a job", PluginsConfig: "plugins"}[annotation]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        arms = list(dict.fromkeys(map(words, arguments)))
        arms = arms[:1] if arms == ["a job", "null"] else arms
        return " or ".join([*filter(None, [", ".join(arms[:-1])]), arms[-1]])
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(annotation) is dict and attrs.has(arguments[1]):
        return f"{arguments[1].__name__.removesuffix('Config').lower()}s by name"
    return describe(annotation)


def default(field: attrs.Attribute[Any]) -> str:
    """A default as the pages say it."""
    if field.name == "name":
        return "the file's stem"
    if field.default is attrs.NOTHING:
        return "required"
    if field.name == "executor":
        return f"`{ExecutorConfig().use}`"
    if isinstance(field.default, attrs.Factory) or field.name == "job":  # type: ignore[arg-type]
        return "none"
    return yaml_of(field.default)


def yaml_of(value: object) -> str:
    """A value as YAML says it."""
    return f"`{'null' if value is None else str(value).lower()}`"


def code(cell: str) -> list[str]:
    """What is set as code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
