"""What tests/gpu/run.py reads: a line for each test that has ended, so that a run which is cut short counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that has ended, or that couldn't begin or clean up."""
    path = os.environ.get("COLOCATE_GPU_RESULTS")
    if not path or (report.when != "call" and report.passed):
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash is not None else report.longrepr).strip().splitlines()[0][:200]
    line = {
        "test": report.nodeid.partition("::")[2],
        "area": report.nodeid.split("::")[1]
        if report.nodeid.count("::") > 1
        else Path(report.nodeid.split("::")[0]).stem,
        "outcome": report.outcome,
        "when": report.when,
        "seconds": round(report.duration, 2),
        "reason": reason,
        "figures": dict(report.user_properties),
    }
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
