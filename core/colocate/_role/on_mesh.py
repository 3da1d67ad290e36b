"""Checks for sharded tensors and modules, without importing torch's distributed packages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Importing torch's packages for sharded models takes as long as torch itself; a sharded model implies these imports.


def is_on_mesh(tensor: object) -> TypeGuard[DTensor]:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def of_fsdp(module: nn.Module, kind: str) -> list[nn.Module]:
    """Return the modules of a model, the root included, that are of a class of torch's FSDP."""
    sharding: Any = getattr(sys.modules.get("torch.distributed.fsdp"), kind, ())
    return [submodule for submodule in module.modules() if isinstance(submodule, sharding)]
