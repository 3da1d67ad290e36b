"""The bench itself: what it says of its numbers. None of them is asserted here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.bench import scale
from tests.bench.__main__ import PARTS, main
from tests.bench.rows import Row
from tests.bench.stub import StubExecutor

import colocate
from colocate import Runtime
from colocate._api.connection import Connection
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("no_leaks")
def test_stub() -> None:
    """The stub executor is an executor: groups start, answer calls on all of their slots, keep, and close."""
    with Runtime._of(Connection("stub", StubExecutor(), 0, False, None, 60.0, None, None, None)) as runtime:
        pool = runtime.reserve(slots=300)
        group = pool.spawn({"echo": colocate.role(Echo), "rows": colocate.role(Rows).on(slots=range(299, 99, -1))})
        rows = group.role("rows", Rows)
        assert group.role("echo", Echo).noop() == [None] * 300
        assert len(rows.seen(rows.double.keep(list(range(200))).ref)) == 200
        assert len(runtime._node.services.executor.running()) == 300
        group.close()
        assert runtime._node.services.executor.running() == []


def test_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` writes what the table shows; a part that isn't there is an error that lists those that are."""
    monkeypatch.setattr(scale, "rows", lambda: [Row("part", "measured", 1.5, "µs", 2)])
    main(["scale", "--json", str(tmp_path / "bench.json")])
    assert "measured" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "bench.json").read_text())
    assert row == {"part": "part", "name": "measured", "value": 1.5, "unit": "µs", "bar": 2, "verdict": "PASS"}
    with pytest.raises(SystemExit):
        main(["scales"])
    assert "calls, before, definitions, residents" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "before"])  # which installs an old commit
def test_parts(part: str) -> None:
    """Each part still runs: it measures what it says, or nothing where it lacks an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:  # Ray's sockets want short paths
        written = Path(folder, "rows.json")
        command = [sys.executable, "-m", "tests.bench", "--json", str(written), part]
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert all(math.isfinite(row["value"]) for row in json.loads(written.read_text()))
