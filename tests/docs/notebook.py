"""Runs a notebook as its reader does, and says where it isn't true.

`python -m tests.docs.notebook` writes what really comes out into it. Then read it.
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
    """Its cells of code, as they are there and as they come out."""
    shown = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    with kernel(folder) as running:
        return [(cell, running.run(cell.source)) for cell in shown]


def untrue(cells: Iterable[tuple[NotebookNode, NotebookNode]]) -> list[str]:
    """Those that show something else than what comes out."""
    return [
        f"{shown.id} shows\n{_text(shown)}\nbut this comes out:\n{_text(real)}"
        for shown, real in cells
        if not matches(_text(shown), _text(real))
    ]


def _text(cell: NotebookNode) -> str:
    return json.dumps([_kept(output) for output in cell.outputs], indent=1, ensure_ascii=False)


def _kept(output: NotebookNode) -> dict[str, object]:
    """What a reader sees of an output."""
    if output.output_type == "stream":
        return {"name": output.name, "text": output.text.splitlines()}
    assert output.output_type != "error", "\n".join(output.traceback)
    return {kind: value.splitlines() for kind, value in sorted(output.data.items())}


def record(notebook: Path) -> None:
    """Write what comes out into it, without this machine's name."""
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
