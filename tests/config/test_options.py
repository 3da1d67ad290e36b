"""Options that are objects: checked with the rest of a config, and made before their role or job."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate.errors import ConfigError

MODULE = """
from __future__ import annotations

from dataclasses import dataclass, field

import attrs
import colocate


@dataclass
class Decay:
    power: float = 1.0


@attrs.frozen
class Optimizer:
    lr: float
    betas: list[float] = attrs.field(factory=lambda: [0.9, 0.99])
    _decay: Decay | None = None


@dataclass(kw_only=True)
class Model:
    optimizer: Optimizer
    more: dict[str, Optimizer] = field(default_factory=dict)
    layers: int = 2

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError("no layers")


class Worker(colocate.Role):
    def __init__(self, model: Model, all: list[Model | str] = ()) -> None:
        self.model, self.all = model, all

    @colocate.method(collect=colocate.First())
    def told(self) -> list[object]:
        layers = [getattr(each, "layers", each) for each in self.all]
        return [self.model.optimizer.lr, self.model.optimizer._decay, self.model.more, layers]


def job(run, *, model: Model | None = None) -> None:
    run.show("told", [{"told": repr(run.groups["group"]["worker"].told()), "model": repr(model)}])
"""
CONFIG: dict[str, Any] = {
    "executor": {"use": "local", "with": {"processes": True}},
    "pools": {"main": {"slots": 1}},
    "groups": {
        "group": {
            "pool": "main",
            "roles": {
                "worker": {
                    "use": "options_module:Worker",
                    "with": {
                        "model": {
                            "optimizer": {"lr": 1, "decay": {"power": 2}},
                            "more": {"slow": {"lr": 0.1}},
                        },
                        "all": ["none", {"optimizer": {"lr": 0.5}, "layers": 7}],
                    },
                }
            },
        }
    },
    "job": {"use": "options_module:job", "with": {"model": {"optimizer": {"lr": 3}}}},
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "options_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def changed(change: Callable[[dict[str, Any]], object], where: str = "roles") -> dict[str, Any]:
    """Return the config with another model."""
    config = copy.deepcopy(CONFIG)
    entry = config["job"] if where == "job" else config["groups"]["group"]["roles"]["worker"]
    change(entry["with"])
    return config


def test_nested_options_are_constructed(tmp_path: Path) -> None:
    """Options are made inside objects, lists, mappings and unions, and the config itself stays plain."""
    config = colocate.load_config(CONFIG)
    assert colocate.load_config(config.to_dict()) == config
    with colocate.launch(config) as job:
        (row,) = job.run(quiet=True).tables["told"]
    assert row["told"] == (
        "[1, Decay(power=2), {'slow': Optimizer(lr=0.1, betas=[0.9, 0.99], _decay=None)}, ['none', 7]]"
    )
    assert row["model"].startswith("Model(optimizer=Optimizer(lr=3,")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda given: given["model"]["optimizer"].update(lr="fast"),
            "model.optimizer.lr: must be a number, not the text 'fast'",
        ),
        (
            lambda given: given["model"]["optimizer"]["decay"].update(pover=1),
            "model.optimizer.decay.pover: Decay has no parameter 'pover' (did you mean 'power'?)",
        ),
        (lambda given: given["model"].pop("optimizer"), "model: Model needs 'optimizer' (Optimizer)"),
        (lambda given: given["model"]["more"]["slow"].clear(), "model.more.slow: Optimizer needs 'lr' (float)"),
        (lambda given: given.update(model=3), "model: must be a mapping (optimizer, more, layers), not 3"),
        (lambda given: given["model"].update(layers=0), "model: Model refuses it: ValueError: no layers"),
    ],
)
def test_nested_option_mistakes_are_reported_with_place(change: Callable[[dict[str, Any]], object], told: str) -> None:
    """A mistake inside an option is reported with its place."""
    with pytest.raises(ConfigError) as caught:
        colocate.load_config(changed(change))
    assert [str(mistake) for mistake in caught.value.mistakes] == [f"groups.group.roles.worker.with.{told}"]


def test_job_option_mistake_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"job\.with\.model\.optimizer: Optimizer needs 'lr'"):
        colocate.load_config(changed(lambda given: given["model"]["optimizer"].clear(), "job"))
