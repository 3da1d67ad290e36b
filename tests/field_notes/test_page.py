"""The page of field notes lists the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["test_lifetime", "test_errors_and_hangs"])
def test_every_note_is_listed_with_its_test(name: str) -> None:
    page = (HERE.parents[1] / "docs" / "field-notes.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ")[1:] if f"`{name}.py`" in part]
    listed = re.findall(r"\| `(test_\w+)` \|", section)
    assert listed
    assert sorted(listed) == sorted(re.findall(r"^def (test_\w+)", (HERE / f"{name}.py").read_text(), re.MULTILINE))
