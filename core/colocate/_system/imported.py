"""Lookup of imported modules."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return the module, or None when nobody has imported it yet.

    One that another thread is about to import doesn't count: half of it isn't there, and no value is made of it yet.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module
