"""Whether tensors and modules are sharded, without an import of what torch has for that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# To import what torch has for sharded models takes as long as torch itself. A model that is sharded has it imported.


def is_on_mesh(tensor: object) -> TypeGuard[DTensor]:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def of_fsdp(module: nn.Module, kind: str) -> list[nn.Module]:
    """Return those parts of a model, itself included, that are of a class of torch's FSDP."""
    sharding: Any = getattr(sys.modules.get("torch.distributed.fsdp"), kind, ())
    return [each for each in module.modules() if isinstance(each, sharding)]
