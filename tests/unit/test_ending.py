"""A worker's process, forked or not, does at its end all that Python does at the end of a script."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import Runtime

FILES: list[Any] = []


class Deleted:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.cycle = self

    def __del__(self) -> None:
        self.path.write_text("deleted")


class Role(colocate.Role):
    @colocate.method
    def leave(self, folder: Path) -> None:
        """Leave work for the end of the process."""
        self.deleted = Deleted(folder / "of a role")
        for mode in ("w", "wb"):
            file: Any = open(folder / f"not closed, {mode}", mode)  # noqa: SIM115
            file.write("x" if mode == "w" else b"x")
            FILES.append(file)
        atexit.register((folder / "handler").write_text, "called")
        weakref.finalize(Role, (folder / "finalizer").write_text, "called")
        ctypes.CDLL(None).printf(b"printed by a library\n")
        threading.Thread(target=self.outlive, args=(folder / "thread",)).start()

    @staticmethod
    def outlive(path: Path) -> None:
        threading.main_thread().join()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # This takes much longer than the rest of the end.
        path.write_text("ended")


@pytest.mark.parametrize("env", [{}, {"PYTHONHASHSEED": "0"}], ids=["fork", "interpreter"])
def test_worker_exit_flushes_and_runs_handlers(
    env: dict[str, str], colocate_processes: Runtime, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker waits for threads, calls exit handlers, and flushes the buffers of files and libraries."""
    with colocate_processes.reserve(1, env=env) as pool:
        pool.spawn({"role": colocate.role(Role)}).role("role", Role).leave(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "of a role": "deleted",
        "not closed, w": "x",
        "not closed, wb": "x",
        "handler": "called",
        "finalizer": "called",
        "thread": "ended",
    }
    assert "printed by a library" in capfd.readouterr().err
