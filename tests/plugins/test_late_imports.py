"""Commands and errors describe unused executors without importing them."""

import os
import subprocess
import sys

import pytest
from tests.distributions.install import Installed

TELL = "print(*sorted({'outpost.executor', 'colocate_ray.executor', 'colocate_dask.executor', 'ray', 'distributed'} & "
TELL += "{*sys.modules}))"
AUDIT = """
import sys
from colocate_run.cli import app
try:
    app(["audit"], standalone_mode=False)
finally:
    TELL
"""
REFUSED = """
import sys, colocate
with colocate.connect() as runtime:
    try:
        runtime.reserve(1, detachable=True)
    except colocate.errors.CapabilityError as error:
        print(error.executors)
TELL
"""
VERSION = """
import sys
from colocate_run.environment import describe_environment
from colocate_run.cli.installed import version_lines
print([*version_lines()][1])
print(*describe_environment())
TELL
"""


def run(installed: Installed, code: str) -> list[str]:
    """Return the output lines of a program with `outpost` installed."""
    path = os.pathsep.join(filter(None, [str(installed("outpost")), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", code.replace("TELL", TELL)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout.splitlines()


def test_audit_imports_no_executor(installed: Installed) -> None:
    """`colocate audit` of this machine imports no executor and no engine: plugins find leftovers by themselves."""
    assert run(installed, AUDIT)[-1] == ""


def test_refused_capability_imports_no_other_executor(installed: Installed) -> None:
    """A refused capability imports no other executor, and its error still names the executors that have it."""
    pytest.importorskip("ray")
    pytest.importorskip("distributed")
    having, loaded = run(installed, REFUSED)
    assert having == "('dask with address=…', 'ray with address=…')"
    assert loaded == ""


def test_engine_versions_need_no_executor_import(installed: Installed) -> None:
    """The versions of engines in `--version` and in a run's record come from executor plugins, without their import."""
    pytest.importorskip("ray")
    executors, recorded, loaded = run(installed, VERSION)
    assert "ray (ray 2." in executors
    assert executors.endswith("outpost") or ", outpost," in executors
    assert "ray" in recorded.split()
    assert loaded == ""
