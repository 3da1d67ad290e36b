"""What a run ran on."""

from __future__ import annotations

import os
import platform
import sys

from colocate._plugins.entry_points import versions_of
from colocate._plugins.plugins import plugins
from colocate.gpus import gpu_names


def environment() -> dict[str, str]:
    """Versions and machine, as people ask for them when numbers differ."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    known = dict(versions_of(("colocate", "torch", "numpy", "transformers")))
    for plugin in plugins():
        known |= plugin.engine() if plugin.kind == "executor" else {}
    found |= {name: version for name, version in known.items() if version is not None}
    torch = sys.modules.get("torch")
    if torch is not None and (names := gpu_names(torch)):
        found["gpus"] = ", ".join(names)
    return found
