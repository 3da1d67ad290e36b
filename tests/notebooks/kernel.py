"""A Jupyter kernel, as a notebook has one: it runs cells one after the other, and returns their outputs.

The kernel listens on Unix sockets in a folder of its own, and has its home there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

WITHIN_S = 60
_HOMES = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Kernel:
    """A running kernel, which works in a folder."""

    def __init__(self, folder: Path, client: NotebookClient, runner: asyncio.Runner) -> None:
        self.folder = folder
        self._client = client
        self._runner = runner

    def interrupt(self) -> None:
        """Interrupt the kernel as the button does, from another thread than the one that runs cells."""
        os.kill(self._client.km.provisioner.pid, signal.SIGINT)

    def run(self, cell: NotebookNode | str) -> NotebookNode:
        """Run a cell to its end; return the cell with its outputs."""
        if isinstance(cell, str):
            cell = new_code_cell(cell)
        self._client.nb.cells.append(cell)
        return self._runner.run(self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1))

    def shows(self, source: str) -> str:
        """Run a cell; return its output and value, or its traceback, as text."""
        return "".join(text_of(output) for output in self.run(source).outputs)


@contextlib.contextmanager
def kernel(folder: Path, notebook: NotebookNode | None = None) -> Iterator[Kernel]:
    """Start a kernel that works in a folder, and stop it at the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _HOMES:
            patch.setenv(name, str(folder / ".home"))
        (folder / ".home").mkdir()
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "k"))
        client = NotebookClient(
            notebook or new_notebook(),
            km=manager,
            timeout=WITHIN_S,
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        # The client would keep a loop of its own, with a thread, until the process exits.
        with asyncio.Runner() as runner:
            session = client.async_setup_kernel(cleanup_kc=True)
            runner.run(session.__aenter__())
            try:
                yield Kernel(folder, client, runner)
            finally:
                runner.run(session.__aexit__(None, None, None))
                manager.context.term()


def text_of(output: NotebookNode) -> str:
    """Return an output as text, without pictures and colours."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return _COLOURS.sub("", "\n".join(output.traceback))
    return str(output.data["text/plain"])


def html_of(output: Any) -> str:
    """Return the html of an output."""
    return str(output.data["text/html"])
