"""Core is in layers, and no import breaks their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests import layers

import colocate
from colocate import features
from colocate._worker_group.hooks import GroupFeature
from colocate.errors import CapabilityError
from colocate.worker.hooks import WorkerFeature

ROOT = Path(__file__).parents[2]


def test_every_module_is_in_a_layer() -> None:
    assert {layers.layer_of(name) for name in layers.modules()} == set(layers.LAYERS)


def test_architecture_page_lists_layers() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.removesuffix(" |").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert rows[: len(layers.LAYERS)] == [[f"| `{name}`", what] for name, what in layers.LAYERS.items()]


def test_no_import_goes_down() -> None:
    """No import goes down a layer, not even one for type checkers or inside a function."""
    assert [
        f"{arrow.importer} ({layers.layer_of(arrow.importer)}) imports {arrow.imported} "
        f"({layers.layer_of(arrow.imported)}): a layer imports only from those above it in tests/layers.py"
        for arrow in layers.against()
    ] == []


def test_features_on_features() -> None:
    """A feature imports another one only by the table, and has a row in core's table and a folder."""
    assert layers.between_features() == layers.FEATURES_ON
    folders = {path.parent.name for path in (layers.CORE / "features").glob("*/__init__.py")}
    assert folders == set(features.FEATURES)


def test_feature_table_matches_messages_and_calls() -> None:
    """The table lists exactly the messages and calls that each feature has."""
    for name, feature in features.FEATURES.items():
        assert {features.import_messages(kind) for kind in feature.messages} <= {name}
        if feature.group:
            assert issubclass(features.group_class(name), GroupFeature)
        if feature.worker or feature.calls:
            assert set(features.worker_class(name).calls) == set(feature.calls)


def test_the_page_has_the_hooks_of_each() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    for name, feature in features.FEATURES.items():
        own = [
            set(vars(half(name))) & set(vars(base)) if has else set()
            for has, half, base in (
                (feature.group, features.group_class, GroupFeature),
                (feature.worker, features.worker_class, WorkerFeature),
            )
        ]
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        told = [set(cell.partition(";")[0].split(", ")) for cell in row.strip("| ").split(" | ")[1:]]
        hooks = [{each for each in names if not each.startswith("_") and each != "calls"} or {"none"} for names in own]
        assert told == hooks, name


def test_without_a_feature() -> None:
    """A request for a missing feature is an error with its name."""
    with pytest.raises(CapabilityError, match="built without its feature 'nothing'"):
        features.get_feature("nothing")


def test_no_circle() -> None:
    assert layers.circles() == []


def test_no_circle_in_a_drawing() -> None:
    """A drawing of all imports has no circle: lazy names of packages, types and functions included."""
    assert layers.circles_of(layers.drawing()) == []


@pytest.mark.parametrize("package", layers.AROUND)
def test_around_core(package: str) -> None:
    """Packages around core have layers, too, which the page lists: no import breaks their order or closes a circle."""
    folder, order = ROOT / package, layers.AROUND[package]
    assert {name for layer in order for name in layer.split()} == set(layers.modules_around(folder))
    assert layers.against_around(folder, order) == []
    assert layers.circles(folder) == []
    row = f"| `{package}/` | {' < '.join(layer.replace(' ', ', ') for layer in order)} |"
    assert row in (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8").splitlines()


def test_every_package_around_core_has_layers() -> None:
    packages = {path.parent for folder in ("executors", "plugins") for path in (ROOT / folder).glob("*/__init__.py")}
    assert {str(path.relative_to(ROOT)) for path in packages} == set(layers.AROUND)


BUILT_ON_CORE = ("executors", "plugins", "docs/examples", *(f"core/{name}" for name in layers.BESIDE))


@pytest.mark.parametrize("folder", BUILT_ON_CORE)
def test_core_dependents_import_public_names_only(folder: str) -> None:
    assert [f"{importer} imports {name}" for importer, name in layers.private(ROOT / folder)] == []


def test_core_imports_from_neighbours_are_limited() -> None:
    """Core imports these names alone from the packages beside it, and only for their users."""
    assert {arrow.importer: arrow.imported for arrow in layers.beside()} == {
        "_api.runtime": "colocate_report.trace.Trace",
        "cli": "colocate_run.cli.main",
        "config": "colocate_run.config",
    }
    assert {home.partition(".")[0] for home in colocate._BESIDE.values()} == set(layers.BESIDE)


def test_where_the_page_says_that_one_looks() -> None:
    """Each file in the page's table exists; a bare name is in the folder of the name before it."""
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    rows = page.partition("## Where to look first\n")[2].partition("\n## ")[0].splitlines()[3:]
    assert len(rows) > 10
    for row in filter(None, rows):
        folder = ROOT
        for name in re.findall(r"`([\w/]+\.py)`", row):
            places = [root / name for root in (folder, layers.CORE, layers.CORE.parent, ROOT / "executors")]
            path = next(filter(Path.is_file, places), None)
            assert path is not None, f"{name}: {row}"
            folder = path.parent
