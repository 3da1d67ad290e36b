"""Lookup of imported modules, and imports on first use that are safe beside signal handlers."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

from colocate._signals.deferred import has_couriers, run_deferred


def imported(name: str) -> Any:
    """Return the module, or None when nobody has imported it yet.

    One that another thread is about to import doesn't count: half of it isn't there, and no value is made of it yet.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module


def import_whole(name: str) -> Any:
    """Import a module on first use, without the risk that a signal handler sees the module half-imported.

    A handler that interrupts an import on the main thread gets the unfinished module: a thread doesn't wait for
    itself. So another thread imports, once one runs; before, handlers have no connection that they may use.
    """
    if (module := imported(name)) is not None:
        return module
    return run_deferred(partial(import_module, name)) if has_couriers() else import_module(name)
