"""Check the compatibility of drivers and workers, which must have equal versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from colocate._system.installed import get_same_line
from colocate._version import __version__

PROTOCOL = 31
"""Protocol version: raise with every change to a message, or to the contents of bodies."""

_EPOCH_BITS = 40  # No driver makes so many calls that more bits are needed.
_COMPARED = {"colocate": "colocate", "protocol": "protocol", "python": "Python"}


def own_facts() -> dict[str, Any]:
    """Return the process id and the versions of this process."""
    python = platform.python_version().rpartition(".")[0]
    return {"pid": os.getpid(), "python": python, "colocate": __version__, "protocol": PROTOCOL}


def describe_mismatch(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Return a text about a mismatch between a driver's and another process's versions; None for compatible versions.

    Args:
        here: The driver's facts to compare.
        there: The worker's facts. Another version of colocate may have other keys.
    """
    for key, name in _COMPARED.items():
        if key in here and there.get(key) != here[key]:
            cure = "install the same in both"
            if key != "python":
                cure += f": {get_same_line()}"
            if key == "protocol" and "colocate" in here:  # In this case the versions of colocate are equal.
                cure = f"both are colocate {here['colocate']}; {cure}"
            return f"has {name} {there.get(key)}, the driver {here[key]}: {cure}"
    return None


def epoch_base(epoch: int) -> int:
    """Return a number below the numbers of all calls, holds and residents of an epoch's driver."""
    return (epoch - 1) << _EPOCH_BITS
