"""What a run ran on."""

from __future__ import annotations

import os
import platform
import sys

from colocate._system.distributions import version_of
from colocate.gpus import gpu_names


def environment() -> dict[str, str]:
    """Versions and machine, as people ask for them when numbers differ."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    for name in ("colocate", "torch", "numpy", "transformers", "ray", "distributed"):
        if (version := version_of(name)) is not None:
            found[name] = version
    torch = sys.modules.get("torch")
    if torch is not None and (names := gpu_names(torch)):
        found["gpus"] = ", ".join(names)
    return found
