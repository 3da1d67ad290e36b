"""A silent worker as the machine shows the process: perhaps stopped by a signal, or in C code that holds the GIL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import psutil

from colocate._system.limits import LOOKED_AT_WITHIN_S
from colocate.worker.birth import processes
from colocate.worker.serving.failure import role_code_of


def seen(started: int) -> str | None:
    """Return the state of the worker below a supervisor, with the lane's stack; None when unknown.

    py-spy reads the stack from the worker's memory without halting the worker. That takes some 30 ms, the kernel's
    permission to read the memory of one's own processes, and py-spy beside this interpreter or on the path.
    """
    worker = processes.worker_below(started)
    try:
        status = psutil.STATUS_ZOMBIE if worker is None else psutil.Process(worker).status()
    except psutil.Error:
        status = psutil.STATUS_ZOMBIE
    if worker is None or status == psutil.STATUS_ZOMBIE:  # the worker is gone
        return None
    stopped = status == psutil.STATUS_STOPPED
    lane = _lane_of(worker)
    state = "stopped by a signal" if stopped else "in C code that holds the GIL" if lane.get("owns_gil") else "silent"
    frames = [
        traceback.FrameSummary(frame["filename"], frame["line"], frame["name"]) for frame in lane.get("frames", ())
    ]
    stack = "".join(traceback.format_list(role_code_of(frames[::-1])))
    return f"{state}\n{stack}" if stack or stopped else None


def py_spy() -> str | None:
    """Return the path of py-spy, beside this interpreter or on the path; None when there is none."""
    local_path = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(local_path) if local_path.exists() else shutil.which("py-spy")


def _lane_of(worker: int) -> dict[str, Any]:
    """Return a worker's main thread, the lane, from py-spy's dump; empty when py-spy is missing or may not look."""
    program = py_spy()
    if program is None:
        return {}
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(worker)]
    try:
        shown = subprocess.run(
            command, capture_output=True, timeout=LOOKED_AT_WITHIN_S, check=True, stdin=subprocess.DEVNULL
        )
        threads: list[dict[str, Any]] = json.loads(shown.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return next((thread for thread in threads if thread["os_thread_id"] == worker), {})
