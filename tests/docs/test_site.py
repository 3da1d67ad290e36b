"""The site has every public name, and can be read without a network."""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT
from tests.unit.test_surface import SURFACE

import colocate
from colocate import Context, errors
from colocate.features.looking.graph import Graph
from colocate_run.config import schema
from colocate_run.config.schema import yaml_fields, yaml_key
from colocate_run.config.trust import HARMLESS_VARIABLES

SITE = ROOT / "build" / "site"
CLASSES = {
    "runtime": "Runtime",
    "pool": "Pool",
    "group": "ColocatedGroup",
    "method": "RoleCall",
    "call": "Call",
    "resident": "Resident",
    "graph": Graph,
}


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site as `make docs` does, if anything has changed."""
    made = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return SITE


@pytest.fixture(scope="module")
def entries(site: Path) -> set[str]:
    """Return the names that have an entry in the reference."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split(" ", 1)[0] for line in listed.splitlines()}


def test_every_public_name_has_an_entry(entries: set[str]) -> None:
    assert {f"colocate.{name}" for name in colocate.__all__} <= entries
    raised = {
        name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.ColocateError)
    }
    assert {f"colocate.errors.{name}" for name in raised} <= entries


@pytest.mark.parametrize("kind", SURFACE)
def test_public_names_have_entries(entries: set[str], kind: str) -> None:
    cls = CLASSES[kind]
    home = f"colocate.{cls}" if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    assert {f"{home}.{name}" for name in SURFACE[kind]} <= entries


def test_every_attribute_of_the_context_is_listed(site: Path) -> None:
    page = (site / "reference" / "context.html").read_text(encoding="utf-8")
    shown = [
        name for name in dir(Context) if not name.startswith("_") and name not in ("hosted", "last_call")
    ]  # core's
    assert [name for name in shown if f">{name}<" not in page] == []


def test_every_key_is_listed(site: Path) -> None:
    page = (site / "reference" / "config.html").read_text(encoding="utf-8")
    kinds = [cls for name, cls in vars(schema).items() if name.endswith("Config")]
    assert [
        yaml_key(f.name) for cls in kinds for f in yaml_fields(cls) if f"<code>{yaml_key(f.name)}</code>" not in page
    ] == []


def test_every_variable_that_a_config_of_others_may_set_is_listed(site: Path) -> None:
    page = (site / "reference" / "trust.html").read_text(encoding="utf-8")
    assert sorted(HARMLESS_VARIABLES - set(re.findall(r"<code>(\w+)</code>", page))) == []


def test_nothing_is_fetched(site: Path) -> None:
    """No page loads anything from another machine."""
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//|url\(\"?(?:https?:)?//")
    asked = {
        file.relative_to(site).as_posix(): found[0]
        for file in site.rglob("*")
        if file.suffix in (".html", ".css") and (found := loads.search(file.read_text(encoding="utf-8")))
    }
    assert asked == {}
