from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from tests.clusters import NONE_IDLE, SPARING, started

pytest.importorskip("ray", reason="Ray is not installed")


@attrs.define(eq=False)
class RunningCluster:
    """A cluster that other people use."""

    process: subprocess.Popen[str]
    options: dict[str, str]
    """What to connect with."""

    def tell(self, word: str) -> None:
        """Have it do something, and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    @property
    def address(self) -> str:
        """Where it is."""
        return self.options["address"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A cluster of two nodes: 2 CPUs and 1 GPU, 1 CPU and 2 GPUs. It wants a token."""
    command = [sys.executable, str(Path(__file__).with_name("clusters.py"))]
    with started("ray", command, {**SPARING, **NONE_IDLE}) as (process, options):
        yield RunningCluster(process, options)
