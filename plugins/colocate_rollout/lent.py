"""Prepare a role's model for generation by an engine, and restore the model afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from colocate import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_TOKENS = ("POLY", "SHADOW", "XLORA")
"""PEFT types whose result for a token depends on other tokens, or on more than tokens."""


def check_adapters(module: PreTrainedModel, name: str) -> None:
    """Refuse a model with PEFT adapters that don't work token by token, such as prompt learning.

    Raises:
        ConfigError: Token-by-token generation would give other results.
    """
    configs: Any = getattr(module, "peft_config", {})
    for config in configs.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            kind = "aLoRA"
        if config.is_prompt_learning or config.is_adaption_prompt or kind in ("aLoRA", *_OF_TOKENS):
            raise ConfigError(
                f"engine 'transformers': the model of role {name!r} has adapters of the kind {kind}, which aren't in "
                "its layers alone: the engine can't generate by it"
            )


def is_sharded(module: PreTrainedModel) -> bool:
    """Return whether each rank has only parts of the model's weights."""
    # Don't import DTensor here, because the import is slow, and no sharded model exists before that import.
    tensors = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return bool(_find_sharded(module)) or any(isinstance(part, tensors) for part in module.parameters())


def is_tensor_parallel(module: PreTrainedModel) -> bool:
    """Return whether the model has sharded weights that FSDP2 doesn't gather, as in tensor parallelism."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate

    gathered = int(any(isinstance(submodule, FSDPModule) for submodule in module.modules()))
    shards = [submodule.placements for submodule in module.parameters() if isinstance(submodule, DTensor)]
    return any(sum(not isinstance(place, Replicate) for place in submodule) > gathered for submodule in shards)


@contextlib.contextmanager
def gather_module(module: PreTrainedModel) -> Iterator[None]:
    """A context manager that gathers a sharded model on each rank and turns off dropout.

    In a sharded model, other ranks would wait for a rank whose rows end early. The end of the block restores the model.
    """
    trains = [submodule for submodule in module.modules() if submodule.training]
    parts = [_ShardedModule(submodule) for submodule in _find_sharded(module)]
    try:
        for submodule in trains:
            submodule.training = False
        for part in parts:
            part.gather_weights()
        yield
    finally:
        for part in parts:
            part.restore_sharding()
        for submodule in trains:
            submodule.training = True


def _find_sharded(module: torch.nn.Module) -> list[Any]:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [part for part in module.modules() if isinstance(part, kind)]


class _ShardedModule:
    """A torch module that FSDP2 shards, with a record of the module's state.

    Whether a module reshards after a forward pass, and the order of forward passes for the next backward pass, are read
    from private attributes of torch 2.11 to 2.14.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._state = module, module._get_fsdp_state()
        # Initialise outermost modules first, as the first forward pass would, because this call determines the root.
        self._state._lazy_init()
        groups = getattr(self._state, "_fsdp_param_groups", None) or [self._state._fsdp_param_group]
        self._groups = [group for group in groups if group is not None]
        self._order = self._state._comm_ctx.post_forward_order
        self._passes = [len(group._post_forward_indices) for group in self._groups], len(self._order)
        self._after_forward = [group.post_forward_mesh_info for group in self._groups]
        self._was_whole = [group.is_unsharded for group in self._groups]

    def gather_weights(self) -> None:
        self._module.reshard()
        self._module.unshard()
        for group in self._groups:
            group.post_forward_mesh_info = None

    def restore_sharding(self) -> None:
        """Restore the module's recorded state, as if no forward pass had run since."""
        self._state._state_ctx.iter_forward_root = None  # A failed forward pass may have left this set.
        indices, passes = self._passes
        del self._order[passes:]
        for group, after_forward, was_whole, index in zip(
            self._groups, self._after_forward, self._was_whole, indices, strict=True
        ):
            group.post_forward_mesh_info = after_forward
            del group._post_forward_indices[index:]
            if not was_whole:
                group._to_sharded()
