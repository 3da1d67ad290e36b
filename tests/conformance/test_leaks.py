"""The leak fixture reports no false leaks, and the pytest plugin imports nothing until it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocate.testing import leaks
from colocate.testing.leaks import LeakWatch, share_between_tests


def test_shared_descriptors_are_no_leak() -> None:
    """Descriptors that `share_between_tests` encloses are no leak of the watched test."""
    outer = LeakWatch()
    with share_between_tests():
        read, write = os.pipe()
    assert outer.describe_leaks() == []
    os.close(read)
    os.close(write)
    outer.check_leaks()


def test_gpu_device_files_are_no_leak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPU device files are no leak: CUDA opens them at its first use, and closes them at the process's end."""
    watch = LeakWatch()
    with (tmp_path / "nvidia0").open("w"):
        assert any("nvidia0" in words for words in watch.describe_leaks())
        monkeypatch.setattr(leaks, "_OF_GPUS", (*leaks._OF_GPUS, str(tmp_path / "nvidia")))
        assert watch.describe_leaks() == []
    watch.check_leaks()


def test_the_plugin_loads_nothing() -> None:
    """The plugin imports no torch, no engine and nothing that it may need later."""
    code = (
        "import sys, colocate.testing.pytest_plugin; "
        "print([name for name in ('torch', 'numpy', 'psutil', 'ray', 'distributed', 'colocate.testing.leaks', "
        "'colocate.testing.executors', 'colocate_local') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_suite_tests_have_docstrings() -> None:
    """Each test of the executor suite has a docstring: a third party reads it when the test fails."""
    from tests.suite.whole import ExecutorSuite

    tests = [value for area in ExecutorSuite.__mro__ for name, value in vars(area).items() if name.startswith("test")]
    assert [test.__name__ for test in tests if not test.__doc__] == []
