"""Compatibility of drivers and workers: only equal versions can talk."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from colocate._system.installed import same_line
from colocate._version import __version__

PROTOCOL = 30
"""Protocol version: raise with every change to a message, or to the contents of bodies."""

_EPOCH_BITS = 40  # more than the number of calls of any driver
_COMPARED = {"colocate": "colocate", "protocol": "protocol", "python": "Python"}


def facts() -> dict[str, Any]:
    """Return the process id and versions that a process reports."""
    python = platform.python_version().rpartition(".")[0]
    return {"pid": os.getpid(), "python": python, "colocate": __version__, "protocol": PROTOCOL}


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Return the mismatch between a driver and another process's facts; None for compatible versions.

    Args:
        here: The driver's facts to compare.
        there: The worker's facts. Another version of colocate may have other keys.
    """
    for key, name in _COMPARED.items():
        if key in here and there.get(key) != here[key]:
            cure = "install the same in both"
            if key != "python":
                cure += f": {same_line()}"
            if key == "protocol" and "colocate" in here:  # equal versions: no use to name them
                cure = f"both are colocate {here['colocate']}; {cure}"
            return f"has {name} {there.get(key)}, the driver {here[key]}: {cure}"
    return None


def base_of(epoch: int) -> int:
    """Return the number below all calls, holds and residents of an epoch's driver."""
    return (epoch - 1) << _EPOCH_BITS
