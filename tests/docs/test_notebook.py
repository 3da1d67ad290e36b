"""The notebook runs, and shows its real outputs."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from tests.docs.notebook import NOTEBOOK, run, untrue


def test_notebook_outputs_are_true(tmp_path: Path) -> None:
    cells = run(NOTEBOOK, tmp_path)
    assert untrue(cells) == []
    assert [path.name for path in tmp_path.iterdir()] == [".home"]  # the kernel's own folder
    (shown, real) = next(each for each in cells if each[0].source.startswith("writer.write("))
    wrong = deepcopy(shown)
    wrong.outputs[0].data["text/plain"] = "['ONE!']"
    assert len(untrue([(wrong, real)])) == 1


def test_notebook_is_short() -> None:
    """The notebook can be read in a minute."""
    assert NOTEBOOK.stat().st_size < 20_000
