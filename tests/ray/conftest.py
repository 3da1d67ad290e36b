from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

pytest.importorskip("ray", reason="Ray is not installed")


@attrs.define(eq=False)
class RunningCluster:
    """A cluster that other people use."""

    process: subprocess.Popen[str]
    address: str
    token_file: Path

    def tell(self, word: str) -> None:
        """Have it do something, and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    @property
    def options(self) -> dict[str, str]:
        """What to connect with."""
        return {"address": self.address, "token_file": str(self.token_file)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A cluster of two nodes: 2 CPUs and 1 GPU, 1 CPU and 2 GPUs. It wants a token."""
    folder = Path(tempfile.mkdtemp(prefix="crt-", dir="/tmp"))  # Ray's sockets need a short name
    token_file = folder / "token"
    token_file.write_text("ab" * 32)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("clusters.py"))],
        env={
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield RunningCluster(process, process.stdout.readline().strip(), token_file)
        process.communicate(timeout=60)
    shutil.rmtree(folder)
