"""The files, settings and processes of a private Ray, which serves one driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from colocate.errors import ClusterError, ColocateError
from colocate.worker.birth.supervisor import TRACKERS_S, is_tracker
from colocate_ray.terms import Cluster

PREFIX = "colocate-ray-"  # Names of folders for private Rays start with this prefix.
_PR_SET_CHILD_SUBREAPER = 36
# Ray's sockets have such paths below the folder: "/r/session_<date>_<microseconds>_<pid>/sockets/plasma_store".
_LONGEST_SOCKET = 107
_BELOW = len("/colocate-ray-12345678/r/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_ENDS_WITHIN_S = 10.0
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_LOG_BYTES, _LINES, _LINE = 64 * 1024, 2, 300
# This matches a log line such as "[2026-11-28 15:04:54,949 C 30173 30184] (raylet) …".
_SEVERE = re.compile(r"\[\S+ \S+ [WEFC] ")
_STORE_BYTES = 100 * 2**20  # The store is small, because colocate puts nothing into Ray's object store.


class PrivateFolder:
    """The folder with all files of a private Ray. Only this user has access."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.mkdir(0o700)
        self.token = self.path / "token"
        descriptor = os.open(self.token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))

    def init_options(self, cluster: Cluster) -> dict[str, Any]:
        """Return the keyword arguments for `ray.init` that start a private Ray."""
        cpus = cluster.cpus
        return {
            "address": "local",  # This overrides RAY_ADDRESS and the address file of another Ray.
            "num_cpus": int(cpus) if cpus is not None and cpus == int(cpus) else cpus,
            "num_gpus": None if cluster.gpus is None else len(cluster.gpus),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_temp_dir": str(self.path / "r"),  # A subfolder is used, because Ray opens this folder to all users.
        }

    def remove_folder(self) -> None:
        """Remove the folder with all files."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_cluster_error(folder: str | Path, why: str) -> ClusterError:
    """Return the error of a private Ray, with the last log lines of the raylet and the control store."""
    texts = {}
    for name in _LOGS:
        with contextlib.suppress(OSError), Path(folder, "r", "session_latest", "logs", name).open("rb") as file:
            file.seek(-min(file.seek(0, os.SEEK_END), _LOG_BYTES), os.SEEK_CUR)
            texts[name] = file.read().decode(errors="replace")
    logs = {name: text for name, text in texts.items() if text.strip()}
    return ClusterError(f"{why}{_read_last_lines(logs)}", logs=logs)


def _read_last_lines(logs: Mapping[str, str]) -> str:
    """Return the last relevant log lines, without C++ stacks and tables of statistics."""
    lines_shown = []
    for name, text in logs.items():
        lines = [line for line in text.partition("*** StackTrace Information ***")[0].splitlines() if line[:1] == "["]
        severe = [line for line in lines if _SEVERE.match(line)]
        lines_shown += [f"\n  {name}: {line[:_LINE]}" for line in (severe or lines)[-_LINES:]]
    return "".join(lines_shown)


def choose_folder() -> str:
    """Return an unused path for the folder of a private Ray.

    Raises:
        ColocateError: Every possible path is too long for Ray's sockets.
    """
    return f"{_choose_parent()}/{PREFIX}{secrets.token_hex(4)}"


def _choose_parent() -> str:
    """Return the folder for temporary files, or /tmp if the paths of Ray's sockets would be too long there."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) + _BELOW <= _LONGEST_SOCKET and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise ColocateError(
        f"a private Ray can't be started: the names of its sockets below {tempfile.gettempdir()} would be too long for "
        "the system, and /tmp can't be written to. Set TMPDIR to a folder with a shorter name"
    )


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that this process can find and end every descendant."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Reap ended children, including adopted orphans, until no child is left."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def end_children() -> None:
    """Kill all descendants of this process.

    Python's resource trackers first get time to remove shared memory of roles, and to exit.
    """
    began = time.monotonic()
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() - began < _ENDS_WITHIN_S:
        for process in children:
            if time.monotonic() - began < TRACKERS_S and is_tracker(process.pid):
                continue
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=1.0)  # This call also reaps zombies that are children of this process.
