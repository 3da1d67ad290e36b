"""A line for each test that has ended, for tests/gpu/run.py: a run that is cut short counts, too.

A fixture starts CUDA first, whose pipes and other files aren't a test's to close.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cuda_is_in_use() -> None:
    """Use the GPU before the first leak check: CUDA's files stay open until this process ends."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        return
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.ones(64, 64, pin_memory=True).to("cuda", non_blocking=True)
            (x @ x).cpu()
    torch.cuda.mem_get_info()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for a test that has ended, or that couldn't begin or clean up."""
    path = os.environ.get("COLOCATE_GPU_RESULTS")
    if not path or (report.when != "call" and report.passed):
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # The main process reports this test, too.
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
