"""Roles that the executor suite runs. They lie in importable modules, so on a cluster they go by name."""

from __future__ import annotations

import importlib
from typing import Any


def optional(name: str) -> Any:
    """Return a module, or None where it isn't installed: what needs it is skipped there.

    A role's module has it among its names, so that workers are forked from a process that has imported it already.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
