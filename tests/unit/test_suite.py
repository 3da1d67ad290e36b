"""Tests of the executor suite itself."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from pathlib import Path

import pytest
from tests import suite
from tests.suite import whole
from tests.suite.whole import ExecutorSuite

from colocate.testing import executors
from colocate.testing.executors import Executor, drivers


def test_no_area_hides_a_test_of_another() -> None:
    """The whole suite has the tests of every area, and no two tests of one name."""
    areas = [area for area in ExecutorSuite.__mro__ if area.__module__ not in (whole.__name__, executors.__name__)]
    for package in (executors, suite):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for thing in vars(importlib.import_module(module.name)).values():
                if isinstance(thing, type) and any(name.startswith("test_") for name in vars(thing)):
                    assert thing in areas or issubclass(thing, Executor), thing
    names = [name for area in areas for name in vars(area) if name.startswith("test_")]
    assert len(areas) > 50
    assert sorted(names) == sorted(set(names))


def test_a_process_that_outlives_a_script_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that keeps a script's output open is named in an error at once."""
    monkeypatch.setattr(drivers, "_FOLLOWS_WITHIN_S", 0.1)
    scripts = drivers.Scripts(tmp_path, "")
    script = scripts.start_script("""
        import subprocess
        say(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        wait()
        """)
    pid = script.read_answer()
    with pytest.raises(AssertionError, match=rf"these still have its output open.*: {pid} \(sleep 1000\)"):
        scripts.end_all()
    os.kill(pid, signal.SIGKILL)
