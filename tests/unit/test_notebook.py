"""A cell of a notebook that is run again, without closing what it made before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import colocate
from colocate import Role, method
from colocate.errors import ClosedError, PlacementTimeout, RoleError
from colocate.testing.probes.plain import Echo


def cell(**options: bool) -> colocate.ColocatedGroup:
    """What such a cell does."""
    runtime = colocate.connect("local", cpus=2, **options)
    return runtime.reserve(slots=2).spawn({"echo": colocate.role(Echo)}, name="policy")


class Wrong(Role):
    @method
    def fail(self) -> int:
        raise ValueError("on purpose")


def test_a_cell_that_is_run_again_replaces_what_it_made() -> None:
    first = cell(replace=True)
    other = colocate.connect("local", strict=True)
    second = cell(replace=True)
    assert not first.alive
    assert not other.alive
    with pytest.raises(ClosedError, match=r"connect\('local', replace=True\) at .*test_notebook.py:\d+\)"):
        first.role("echo", Echo).noop()
    assert second.role("echo", Echo).noop() == [None, None]
    second.owner.owner.close()


def _nothing(context: colocate.Context) -> None:
    """Come after what was asked for before."""


def test_what_was_wrong_before_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A cell is run again because it had failed."""
    pool = colocate.connect("local", cpus=2).reserve(slots=2)
    with pytest.raises(RoleError):
        pool.spawn({"wrong": colocate.role(Wrong)})["wrong"].fail.keep().fetch()
    pool.groups["group-1"].role("wrong", Wrong).fail.keep()
    pool.groups["group-1"].run(_nothing)  # which is over after it
    with colocate.connect("local", cpus=2, replace=True) as second:
        assert second.reserve(slots=2).spawn({"echo": colocate.role(Echo)})["echo"].noop() == [None, None]
    assert "RoleError: wrong.fail raised ValueError on rank" in caplog.text
    assert re.search(
        r"runtime 'local' was closed, and this had gone wrong \(connected at .*test_notebook.py", caplog.text
    )


def test_what_is_not_replaced_stays() -> None:
    first = cell()
    second = cell()
    assert first.role("echo", Echo).noop() == second.role("echo", Echo).noop()
    for group in (first, second):
        group.owner.owner.close()


def test_the_pool_of_the_run_before_is_named() -> None:
    with colocate.connect("local", cpus=2) as runtime:
        runtime.reserve(slots=2, name="main")
        with pytest.raises(PlacementTimeout) as caught:
            runtime.reserve(slots=2, timeout=0)
        assert "of this runtime's own, pool 'main' has 2 (reserved at " in str(caught.value)
        assert "test_notebook.py:" in str(caught.value)


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
    """`python -i page.py`: the classes of the script and those of the prompt, in processes."""
    (tmp_path / "page.py").write_text(SCRIPT)
    command = [sys.executable, "-i", "page.py"]
    done = subprocess.run(command, input=BY_HAND, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['A', 'B']", "[['C'], ['C']]"]
    assert "Error" not in done.stderr
