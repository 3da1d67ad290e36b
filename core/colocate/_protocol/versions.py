"""Which driver and worker can talk: those of one version."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from colocate._system.pip import same_line

PROTOCOL = 10
"""Goes up with every change to a message, or to what bodies contain."""

_COMPARED = {"colocate": "colocate", "protocol": "protocol", "python": "Python"}


def facts() -> dict[str, Any]:
    """What a process says of itself: its id and versions."""
    import colocate

    python = platform.python_version().rpartition(".")[0]
    return {"pid": os.getpid(), "python": python, "colocate": colocate.__version__, "protocol": PROTOCOL}


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """What is wrong with a worker of such facts, or another process that an engine has; None when they can talk.

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
