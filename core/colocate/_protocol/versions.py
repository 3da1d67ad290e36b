"""Which driver and worker can talk: those of one version."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from colocate._system.installed import same_line
from colocate._version import __version__

PROTOCOL = 30
"""Goes up with every change to a message, or to what bodies contain."""

_EPOCH_BITS = 40  # more calls than a driver can make
_COMPARED = {"colocate": "colocate", "protocol": "protocol", "python": "Python"}


def facts() -> dict[str, Any]:
    """Return what a process says of itself: its id and versions."""
    python = platform.python_version().rpartition(".")[0]
    return {"pid": os.getpid(), "python": python, "colocate": __version__, "protocol": PROTOCOL}


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a worker of such facts, or another process that a cluster has; None when they can talk.

    Args:
        here: The driver's facts: those that are to be compared.
        there: The worker's. Another version of colocate may have others.
    """
    for key, name in _COMPARED.items():
        if key in here and there.get(key) != here[key]:
            cure = "install the same in both"
            if key != "python":
                cure += f": {same_line()}"
            if key == "protocol" and "colocate" in here:  # it has been compared, so a version's name wouldn't help
                cure = f"both are colocate {here['colocate']}; {cure}"
            return f"has {name} {there.get(key)}, the driver {here[key]}: {cure}"
    return None


def base_of(epoch: int) -> int:
    """Return what is below the numbers of all calls, holds and residents of the driver of an epoch.

    Each driver that commands a pool has an epoch, higher than that of any before it.
    """
    return (epoch - 1) << _EPOCH_BITS
