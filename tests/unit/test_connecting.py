"""`connect` notifies an executor before it imports the rest of colocate, and mistakes get a remedy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import colocate

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
    """The executor gets the given options before the import, which takes as long as a worker's start."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'processes': True} False"


@pytest.mark.parametrize(
    ("kind", "maker"), [("Runtime", "colocate.connect"), ("Pool", "runtime.reserve"), ("ColocatedGroup", "pool.spawn")]
)
def test_uncallable_class_error_names_the_function(kind: str, maker: str) -> None:
    """A class that can't be called by users names the function that makes its objects."""
    with pytest.raises(TypeError, match=rf"a {kind} is made by {maker}\(\.\.\.\), not by its class"):
        getattr(colocate, kind)("local")


@pytest.mark.parametrize(
    ("wrong", "meant"), [({"slot": 2}, "slots"), ({"sed": 1}, "seed"), ({"proceses": True}, "processes")]
)
def test_a_misspelt_option(wrong: dict[str, Any], meant: str) -> None:
    """The error for a misspelt option suggests the nearest one, be it the executor's or the function's own."""
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.spawn({}, **wrong)
    (mistake,) = caught.value.mistakes
    assert mistake.nearest == meant
    if meant != "slots":
        with pytest.raises(colocate.ConfigError, match=f"did you mean '{meant}'"):
            colocate.connect(**wrong)
