"""Runs callbacks when torch or NumPy is first imported in a worker, whichever code imports the module.

Two threads of a worker may import torch first: the lane, for a role, and the thread that makes the default process
group. While one thread is in `import torch`, `import torch.distributed` in the other doesn't wait: Python locks each
module by itself, and a submodule is imported as soon as its package has begun. So the imports take turns.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any


def call_on_import(acts: Mapping[str, Callable[[], object]]) -> None:
    """Register callbacks for the import of modules, and run the callbacks of already imported modules at once.

    Only for worker processes. Until all modules are imported, only one thread at a time may import torch.

    Args:
        acts: By module ("torch", "numpy.random") the callback, run on the importing thread. It must not raise.
    """
    pending = dict(acts)
    turn = threading.RLock()
    plain_import, import_module = builtins.__import__, importlib.import_module

    def then() -> None:
        for name in [*pending]:
            if _is_imported(name) and (act := pending.pop(name, None)) is not None:
                act()
        if not pending:
            if builtins.__import__ is importing:
                builtins.__import__ = plain_import
            if importlib.import_module is module_importing:
                importlib.import_module = import_module

    def looking(imports: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        package = name.partition(".")[0]
        if package not in packages or not pending:
            return imports(name, *args, **kwargs)
        with turn if package == "torch" else nullcontext():
            module = imports(name, *args, **kwargs)
            then()
            return module

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        return looking(plain_import, name, *args, **kwargs)

    def module_importing(name: str, package: str | None = None) -> Any:
        return looking(import_module, name, package)

    then()
    packages = {name.partition(".")[0] for name in pending}
    if pending:
        builtins.__import__ = importing
        importlib.import_module = module_importing


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
