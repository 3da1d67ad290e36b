"""Look up modules that are already imported."""

from __future__ import annotations

import sys
from typing import Any


def find_imported(name: str) -> Any:
    """Return a module by name; None if the module isn't imported yet.

    A module that another thread is still importing doesn't count: the module is incomplete, and no values of its types
    exist.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module
