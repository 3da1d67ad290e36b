"""What shows a slot's GPUs to its workers, of whatever kind they are."""

from __future__ import annotations

import pytest

from colocate.gpus import SHOWING
from colocate_ray.holder import _shown


@pytest.mark.parametrize("variable", sorted(SHOWING))
@pytest.mark.parametrize("is_told", [False, True])
def test_what_shows_them(monkeypatch: pytest.MonkeyPatch, variable: str, is_told: bool) -> None:
    """The variable by which Ray has done so, or that it was told to leave alone; in order."""
    for name in SHOWING:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"RAY_EXPERIMENTAL_NOSET_{name}", raising=False)
    if is_told:
        monkeypatch.setenv(f"RAY_EXPERIMENTAL_NOSET_{variable}", "1")
    else:
        monkeypatch.setenv(variable, "3,1")
    assert _shown(["1", "3"]) == {variable: "1,3"}
