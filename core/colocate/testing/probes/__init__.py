"""Roles that the executor suite runs. Their modules are importable, so that a cluster can load them by name."""

from __future__ import annotations

import importlib
from typing import Any


def import_optional(name: str) -> Any:
    """Return a module, or None if the module isn't installed.

    A role's module calls this at import, so that workers are forked from a process that has imported the module.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
