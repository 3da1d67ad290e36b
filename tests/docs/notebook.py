"""Run a notebook as its reader does, and report wrong outputs.

`python -m tests.docs.notebook` writes the real outputs into the notebook. Read the notebook afterwards.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from tests.docs.blocks import ROOT
from tests.docs.outputs import NODE, matches
from tests.notebooks.kernel import kernel

NOTEBOOK = ROOT / "docs" / "examples" / "first-group.ipynb"


def run(notebook: Path, folder: Path) -> list[tuple[NotebookNode, NotebookNode]]:
    """Return the code cells, each as shown in the notebook and as run."""
    shown = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    with kernel(folder) as running:
        return [(cell, running.run(cell.source)) for cell in shown]


def untrue(cells: Iterable[tuple[NotebookNode, NotebookNode]]) -> list[str]:
    """Describe the cells whose shown output differs from the real one."""
    return [
        f"{shown.id} shows\n{_text(shown)}\nbut this comes out:\n{_text(real)}"
        for shown, real in cells
        if not matches(_text(shown), _text(real))
    ]


def _text(cell: NotebookNode) -> str:
    return json.dumps([_kept(output) for output in cell.outputs], indent=1, ensure_ascii=False)


def _kept(output: NotebookNode) -> dict[str, object]:
    """Return the parts of an output that a reader sees."""
    if output.output_type == "stream":
        return {"name": output.name, "text": output.text.splitlines()}
    assert output.output_type != "error", "\n".join(output.traceback)
    return {kind: value.splitlines() for kind, value in sorted(output.data.items())}


def record(notebook: Path) -> None:
    """Write the real outputs into a notebook, without this machine's name."""
    found = nbformat.read(notebook, as_version=4)
    cells = [cell for cell in found.cells if cell.cell_type == "code"]
    with tempfile.TemporaryDirectory() as folder:
        results = run(notebook, Path(folder))
    for number, (cell, (_, real)) in enumerate(zip(cells, results, strict=True), 1):
        text = re.sub(rf"\b{re.escape(platform.node())}\b", NODE, json.dumps(real.outputs))
        cell.outputs = [nbformat.from_dict(output) for output in json.loads(text)]
        cell.execution_count = number
        cell.metadata = {}
    nbformat.write(found, notebook)
    sys.stdout.write(f"{notebook}: {len(cells)} cells written\n")


if __name__ == "__main__":
    record(NOTEBOOK)
