"""`colocate schema`: a JSON schema by which editors find mistakes that `colocate check` reports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.cli.conftest import CommandLine

import colocate
from colocate_run.cli.schema import json_schema

jsonschema: Any = importlib.import_module("jsonschema")  # the package has no types; notebooks install it
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def mistakes(config: Any) -> list[str]:
    found = jsonschema.Draft202012Validator(json_schema()).iter_errors(config)
    return [f"{error.json_path}: {error.message}" for error in found]


CONFIGS = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if path.parent.name != "operations"]  # these are manifests


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_configs_are_valid(path: Path) -> None:
    """Every example config is valid by the schema."""
    assert mistakes(YAML(typ="safe").load(path)) == []


def test_written_out() -> None:
    assert mistakes(colocate.load_config({"observe": ["tensorboard"], "executor": "local"}).to_dict()) == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"pool": {}}, "Additional properties are not allowed ('pool' was unexpected)"),
        ({"pools": {"main": {}}}, "$.pools.main: 'slots' is a required property"),
        ({"pools": {"main": {"slots": "2"}}}, "$.pools.main.slots: '2' is not of type 'integer'"),
        ({"pools": {"main": {"slots": 2, "strategy": "pac"}}}, "'pac' is not one of ['pack', 'spread', "),
        ({"groups": {"a": {"pool": "main", "roles": {"b": 3}}}}, "$.groups.a.roles.b: 3 is not valid"),
    ],
)
def test_invalid_configs_are_refused(config: Any, told: str) -> None:
    (found,) = mistakes(config)
    assert told in found


def test_the_command(colocate: CommandLine) -> None:
    """`colocate schema` prints the schema, in which every key has a description."""
    done = colocate("schema")
    found = json.loads(done.stdout)
    assert found == json_schema()
    every = [found, *found["$defs"].values()]
    assert all(each["description"] for kind in every for each in kind["properties"].values())
