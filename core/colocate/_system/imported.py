"""Modules on first use: those that are there already, and those that a signal's handler may want, too."""

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
    """Import a module on its first use, of which a signal's handler never sees a half.

    A handler that interrupts the main thread amid an import gets the module as it is by then, since a thread doesn't
    wait for itself. So another thread imports, once there is one: before, nothing is connected that a handler may use.
    """
    if (module := imported(name)) is not None:
        return module
    return run_deferred(partial(import_module, name)) if has_couriers() else import_module(name)
