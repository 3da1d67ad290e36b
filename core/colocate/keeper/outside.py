"""The inspection of an unresponsive worker from outside the worker's process, with py-spy."""

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
from colocate.worker.serving.failure import trim_to_role_code


def inspect_worker(started: int) -> str | None:
    """Return the state of the worker below a supervisor, with the stack of the lane. None if the state is unknown.

    The worker may be stopped by a signal, or in C code that holds the GIL. py-spy reads the stack from the worker's
    memory without halting the worker, in about 30 ms. This needs py-spy, and the kernel's permission to read other
    processes.
    """
    worker = processes.find_worker(started)
    try:
        status = psutil.STATUS_ZOMBIE if worker is None else psutil.Process(worker).status()
    except psutil.Error:
        status = psutil.STATUS_ZOMBIE
    if worker is None or status == psutil.STATUS_ZOMBIE:  # The worker has ended.
        return None
    stopped = status == psutil.STATUS_STOPPED
    lane = _read_lane(worker)
    state = "stopped by a signal" if stopped else "in C code that holds the GIL" if lane.get("owns_gil") else "silent"
    frames = [
        traceback.FrameSummary(frame["filename"], frame["line"], frame["name"]) for frame in lane.get("frames", ())
    ]
    stack = "".join(traceback.format_list(trim_to_role_code(frames[::-1])))
    return f"{state}\n{stack}" if stack or stopped else None


def find_py_spy() -> str | None:
    """Return the path of the program py-spy, beside this interpreter or on the path; None if there is none."""
    local_path = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(local_path) if local_path.exists() else shutil.which("py-spy")


def _read_lane(worker: int) -> dict[str, Any]:
    """Return py-spy's data on a worker's main thread, the lane. Empty if py-spy is missing or has no permission."""
    program = find_py_spy()
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
