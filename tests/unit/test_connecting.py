"""`connect`: an executor is told before the rest of colocate is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import colocate
from colocate import keeper
from colocate._api import connecting
from colocate.executor import Executor
from colocate.keeper import forks
from colocate.testing.waiting import wait_until
from colocate_local.local import Local

PROGRAM = """
import sys
import colocate
from colocate_local.local import Local

def foresee(options):
    print(options, "colocate._api.runtime" in sys.modules)

Local.foresee = foresee
colocate.connect("local", processes=True).close()
"""


def test_before_the_rest_is_imported() -> None:
    """With the options as they were given; a worker's start takes as long as that import."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'processes': True} False"


def test_options_are_checked_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that they may have begun keeps them from being refused."""
    seen: list[Mapping[str, Any]] = []

    class Foreseeing(Local):
        @classmethod
        def foresee(cls, options: Mapping[str, Any]) -> None:
            seen.append(dict(options))

    def found(name: str) -> type[Executor]:
        return Foreseeing

    monkeypatch.setattr(connecting, "find_executor", found)
    with pytest.raises(colocate.ConfigError, match="procesess"):
        colocate.connect("local", procesess=True)
    assert seen == [{"procesess": True}]


def test_a_template_that_is_foreseen(no_leaks: None) -> None:
    """It is started for workers that are processes, and for no others."""
    started: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "hold", started.append)
        patch.setattr(forks, "let_go", lambda: None)
        Local.foresee({"processes": False})
        Local.foresee({})
        assert not started
        Local.foresee({"processes": True})
        assert len(started) == 1
    Local.foresee({"processes": True})
    wait_until(forks.own_process, "the template is there")


def test_names_that_come_when_they_are_used() -> None:
    """Each that `colocate.keeper` exports is there, and no other."""
    for name in keeper.__all__:
        assert getattr(keeper, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Keper'"):
        keeper.Keper  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "maker"), [("Runtime", "colocate.connect"), ("Pool", "runtime.reserve"), ("ColocatedGroup", "pool.spawn")]
)
def test_nothing_is_made_by_its_class(kind: str, maker: str) -> None:
    """Who tries reads what makes it."""
    with pytest.raises(TypeError, match=rf"a {kind} is made by {maker}\(\.\.\.\), not by its class"):
        getattr(colocate, kind)("local")


@pytest.mark.parametrize(
    ("wrong", "meant"), [({"slot": 2}, "slots"), ({"sed": 1}, "seed"), ({"proceses": True}, "processes")]
)
def test_a_misspelt_option(wrong: dict[str, Any], meant: str) -> None:
    """What is near it is suggested, be it the executor's own, or what the function itself takes."""
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.spawn({}, **wrong)
    (mistake,) = caught.value.mistakes
    assert mistake.nearest == meant
    if meant != "slots":
        with pytest.raises(colocate.ConfigError, match=f"did you mean '{meant}'"):
            colocate.connect(**wrong)
