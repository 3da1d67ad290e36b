"""Files that grow by whole pieces, and what a run and a trace do where a disk is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colocate._system.files import GrowingFile

# No file may be longer than so: past that, writing fails as on a full disk, in the middle of a piece.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
"""
GROWING = """
from pathlib import Path
from colocate._system.files import GrowingFile
file = GrowingFile(Path("file"))
file.add("a" * 2990)
try:
    file.add("b" * 20)
except OSError as error:
    print(error)
file.add("c" * 10)
file.close()
"""
RUN = """
import colocate
from colocate.testing.probes.plain import Echo
with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
    echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
    with runtime.trace("trace.json"):
        for _ in range(50):
            echo.noop()
    with colocate.record(runtime, "sums") as run:
        for step in range(1000):
            run.log(step, loss=1.0)
"""


def limited(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED + script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_all_of_a_piece_or_nothing(tmp_path: Path) -> None:
    done = limited(tmp_path, GROWING)
    assert done.returncode == 0, done.stderr
    assert "too large" in done.stdout
    assert str(Path("file")) in done.stdout
    assert (tmp_path / "file").read_text() == "a" * 2990 + "c" * 10


def test_a_pipe(tmp_path: Path) -> None:
    """Somebody reads a trace as it comes."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        file = GrowingFile(tmp_path / "pipe", anew=True)
        file.add("a")
        file.add("b")
        file.close()
        assert read.result() == "ab"


def test_a_run_and_a_trace(tmp_path: Path) -> None:
    """The trace ends, which is said once; a metric that can't be kept is the run's error, which names the file."""
    done = limited(tmp_path, RUN)
    assert done.stderr.count("the trace ends here") == 1
    assert done.stderr.count("trace.json") == 1
    assert json.loads((tmp_path / "trace.json").read_text())
    assert f"File too large: '{tmp_path}/sums/metrics.jsonl'" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "sums" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert not [path.name for path in (tmp_path / "sums").iterdir() if path.suffix == ".part"]
