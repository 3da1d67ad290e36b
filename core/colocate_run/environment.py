"""Describe the machine, the software and the command of a run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys

from colocate.gpus import gpu_names
from colocate.plugins import plugins, versions_of
from colocate_run.config.secrets import hide_secret_arguments

_GIT_WITHIN_S = 5.0


def describe_origin() -> dict[str, str]:
    """Return this process's host and command, and the commit of the working directory."""
    facts = {"host": platform.node(), "command": shlex.join(hide_secret_arguments(sys.orig_argv))}
    try:
        commit = _run_git("rev-parse", "HEAD")
        facts["commit"] = commit + (
            " with changes" if _run_git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):  # There is no git or no repository, or git is too slow.
        pass
    return facts


def _run_git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_WITHIN_S, check=True).stdout.strip()


def describe_environment() -> dict[str, str]:
    """Return the versions and the machine, which may explain why two runs differ."""
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    versions = dict(versions_of(("colocate", "torch", "numpy", "transformers")))
    for plugin in plugins():
        versions |= plugin.engine() if plugin.kind == "executor" else {}
    facts |= {name: version for name, version in versions.items() if version is not None}
    torch = sys.modules.get("torch")
    if torch is not None and (names := gpu_names(torch)):
        facts["gpus"] = ", ".join(names)
    return facts
