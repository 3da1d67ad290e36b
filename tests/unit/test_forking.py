"""What tests use to fork: a child is waited for, and one that hangs is ended."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import threading
from pathlib import Path

from colocate.testing.forking import exit_code, fork


def test_it_ends() -> None:
    child = fork()
    if child == 0:
        os._exit(3)
    assert exit_code(child) == 3


def test_it_hangs(tmp_path: Path) -> None:
    """What faulthandler says of it tells where."""
    stack = tmp_path / "stack"
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of it
            with stack.open("w") as file:
                faulthandler.enable(file)
                os.write(writing, b".")
                threading.Event().wait()
        finally:
            os._exit(3)
    os.close(writing)
    with open(reading, "rb") as ready:
        assert ready.read(1) == b"."
    assert exit_code(child, 0.1) == -signal.SIGABRT
    assert "test_it_hangs" in stack.read_text()
