"""A run and a trace on a full disk end with one error each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# A file may be no longer than this: a write past it fails in the middle, as on a full disk.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
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


def test_a_run_and_a_trace(tmp_path: Path) -> None:
    """The trace ends with one message; a metric that can't be written is the run's error, with the file's name."""
    command = [sys.executable, "-c", LIMITED + RUN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.count("the trace ends here") == 1
    assert done.stderr.count("trace.json") == 1
    assert json.loads((tmp_path / "trace.json").read_text())
    assert f"File too large: '{tmp_path}/sums/metrics.jsonl'" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "sums" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert not [path.name for path in (tmp_path / "sums").iterdir() if path.suffix == ".part"]
