"""Lookup of imported modules."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return a module, or None if not imported yet.

    A module that another thread is still importing doesn't count: the module is incomplete, and no values of its types
    exist.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module
