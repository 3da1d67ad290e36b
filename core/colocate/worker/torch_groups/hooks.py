"""What a worker does when torch or NumPy comes, once, whoever imports it, and not before; what it has torch tell it.

Two threads of a worker may need it first: the lane, for a role, and the one that makes the default process group.
While one of them is in `import torch`, `import torch.distributed` doesn't wait for that in the other: Python locks each
module by itself, and a part of a package is imported as soon as the package is begun. So they take turns.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from colocate._role.context import CallState, running_call


def when_imported(acts: Mapping[str, Callable[[], object]]) -> None:
    """Have something done as soon as modules are there, or now if they are.

    In a process of its own: until then imports of torch take turns there.

    Args:
        acts: By module ("torch", "numpy.random"), what to do, by the thread that has imported it. It must not raise.
    """
    left = dict(acts)
    turn = threading.RLock()
    plain_import, import_module = builtins.__import__, importlib.import_module

    def then() -> None:
        for name in [*left]:
            if _is_there(name) and (act := left.pop(name, None)) is not None:
                act()
        if not left:
            if builtins.__import__ is importing:
                builtins.__import__ = plain_import
            if importlib.import_module is module_importing:
                importlib.import_module = import_module

    def looking(imports: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        package = name.partition(".")[0]
        if package not in packages or not left:
            return imports(name, *args, **kwargs)
        with turn if package == "torch" else nullcontext():
            found = imports(name, *args, **kwargs)
            then()
            return found

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        return looking(plain_import, name, *args, **kwargs)

    def module_importing(name: str, package: str | None = None) -> Any:
        return looking(import_module, name, package)

    then()
    packages = {name.partition(".")[0] for name in left}
    if left:
        builtins.__import__ = importing
        importlib.import_module = module_importing


def _is_there(name: str) -> bool:
    """Whether a module is imported, and not just being so."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def count_updates(last: Callable[[], CallState | None], operations: Callable[[], int]) -> None:
    """Count in each call, from now on, how many updates of weights it has made.

    That tells whether ranks which share a model still have one state. Torch tells before and after each step of any
    optimizer. Both are counted, so that who fails within one is seen as that: its number is odd. The weights are shared
    where the role has begun operations of process groups since the optimizer's last step, in this call or in earlier
    ones: gradients may be made by one method and used by another.

    Args:
        last: The call that a thread works for which has none of its own.
        operations: How many operations of process groups this process has begun.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by the role, at the last step

    def before(optimizer: Any, *_: Any) -> None:
        call = running_call.get() or last()
        if call is not None:
            call.step_events += 1
            call.shares = call.shares or call.before + operations() != begun.get(optimizer, 0)

    def after(optimizer: Any, *_: Any) -> None:
        call = running_call.get() or last()
        if call is not None:
            call.step_events += 1
            begun[optimizer] = call.before + operations()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
