"""Detect sharded tensors and modules without importing torch's distributed packages.

Importing these packages takes as long as torch itself. Wherever a sharded model exists, they are imported already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_on_mesh(tensor: object) -> TypeGuard[DTensor]:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def find_fsdp_modules(module: nn.Module, kind: str) -> list[nn.Module]:
    """Return a model's modules, including the root, that are instances of the FSDP class with the name `kind`."""
    sharding: Any = getattr(sys.modules.get("torch.distributed.fsdp"), kind, ())
    return [submodule for submodule in module.modules() if isinstance(submodule, sharding)]
