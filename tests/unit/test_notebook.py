"""Notebook cells that run again without a close, and a script's names at an interactive prompt."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate.errors import ClosedError, PlacementTimeout
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo


def cell(replace: bool) -> colocate.ColocatedGroup:
    runtime = colocate.connect("local", cpus=2, replace=replace)
    roles: dict[str, Any] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}
    return runtime.reserve(slots=2, name="main").spawn(roles, name="policy")


def test_replacing_connect_closes_earlier_runtimes(caplog: pytest.LogCaptureFixture) -> None:
    """A connect with `replace=True`, and no other, closes all earlier runtimes and logs their failures."""
    first, beside = cell(replace=True), cell(replace=False)
    other = colocate.connect("local", strict=True)
    assert first.role("echo", Echo).noop() == beside.role("echo", Echo).noop() == [None, None]
    beside.role("faulty", Faulty).fail.keep()
    beside.role("echo", Echo).noop.submit().exception()  # `fail` has ended before this
    second = cell(replace=True)
    assert not first.alive
    assert not beside.alive
    assert not other.alive
    with pytest.raises(ClosedError, match=r"connect\('local', replace=True\) at .*test_notebook.py:\d+\)"):
        first.role("echo", Echo).noop()
    assert "RoleError: faulty.fail raised ValueError on rank" in caplog.text
    assert re.search(r"runtime 'local' was closed with errors \(connected at .*test_notebook.py", caplog.text)
    assert second.role("echo", Echo).noop() == [None, None]
    with pytest.raises(PlacementTimeout) as caught:  # The error names the pool that has the slots.
        second.owner.owner.reserve(slots=2, timeout=0)
    assert re.search(r"runtime's own, pool 'main' has 2 \(reserved at .*test_notebook.py:\d", str(caught.value))
    second.owner.owner.close()


SCRIPT = """\
import colocate
from colocate import Concat, Role, Scatter, method


class Writer(Role):
    @method(dispatch=Scatter("words"), collect=Concat())
    def write(self, words):
        return [word.upper() for word in words]


runtime = colocate.connect(processes=True)
pool = runtime.reserve(slots=2)
group = pool.spawn({"writer": colocate.role(Writer)}, name="first")
"""

BY_HAND = """\
group.role("writer", Writer).write(["a", "b"])
group.close()
class Louder(Writer):
    @method
    def shout(self):
        return self.write(["c"])

pool.spawn({"louder": colocate.role(Louder)})["louder"].shout()
runtime.close()
"""


def test_going_on_by_hand_after_a_script(tmp_path: Path) -> None:
    """Classes of a script under `python -i`, and subclasses typed at its prompt, work in worker processes."""
    (tmp_path / "page.py").write_text(SCRIPT)
    command = [sys.executable, "-i", "page.py"]
    done = subprocess.run(command, input=BY_HAND, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['A', 'B']", "[['C'], ['C']]"]
    assert "Error" not in done.stderr
