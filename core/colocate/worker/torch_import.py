"""What a worker does when torch comes: once, whoever imports it, and not before.

Two threads of a worker may need it first: the lane, for a role, and the one that makes the default process group.
While one of them is in `import torch`, `import torch.distributed` doesn't wait for that in the other: Python locks each
module by itself, and a part of a package is imported as soon as the package is begun. So they take turns.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any


def when_torch_comes(act: Callable[[], object]) -> None:
    """Have something done as soon as torch is there, or now if it is.

    In a process of its own: until then imports take turns there where they are of torch.

    Args:
        act: What to do, by the thread that has imported it. It must not raise.
    """
    if _is_there():
        act()
        return
    turn = threading.RLock()
    done = False
    plain_import, import_module = builtins.__import__, importlib.import_module

    def then() -> None:
        nonlocal done
        if not done and _is_there():
            done = True
            if builtins.__import__ is importing:
                builtins.__import__ = plain_import
            if importlib.import_module is module_importing:
                importlib.import_module = import_module
            act()

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if done or name.partition(".")[0] != "torch":
            return plain_import(name, *args, **kwargs)
        with turn:
            found = plain_import(name, *args, **kwargs)
            then()
            return found

    def module_importing(name: str, package: str | None = None) -> Any:
        if done or name.partition(".")[0] != "torch":
            return import_module(name, package)
        with turn:
            found = import_module(name, package)
            then()
            return found

    builtins.__import__ = importing
    importlib.import_module = module_importing


def _is_there() -> bool:
    """Whether it is imported, and not just being so."""
    torch = sys.modules.get("torch")
    return torch is not None and not getattr(torch.__spec__, "_initializing", False)
