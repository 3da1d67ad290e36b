"""A role's model, borrowed by an engine that generates: whole on each rank, without dropout, restored afterwards."""

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
    """Refuse a model with adapters outside the layers.

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
    # A sharded model exists only after this import, which is too slow to make here.
    tensors = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return bool(_parts(module)) or any(isinstance(each, tensors) for each in module.parameters())


def computes_together(module: PreTrainedModel) -> bool:
    """Return whether ranks have parts of weights that FSDP2 doesn't gather, as in tensor parallelism."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate

    gathered = int(any(isinstance(each, FSDPModule) for each in module.modules()))
    shards = [each.placements for each in module.parameters() if isinstance(each, DTensor)]
    return any(sum(not isinstance(place, Replicate) for place in each) > gathered for each in shards)


@contextlib.contextmanager
def whole(module: PreTrainedModel) -> Iterator[None]:
    """Prepare a model to generate in the block: whole on each rank, without dropout.

    Otherwise a rank whose rows end early would keep the others waiting. The end of the block restores the model.
    """
    trains = [each for each in module.modules() if each.training]
    parts = [_Part(each) for each in _parts(module)]
    try:
        for each in trains:
            each.training = False
        for part in parts:
            part.gather()
        yield
    finally:
        for part in parts:
            part.go_back()
        for each in trains:
            each.training = True


def _parts(module: torch.nn.Module) -> list[Any]:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [each for each in module.modules() if isinstance(each, kind)]


class _Part:
    """A module that FSDP2 shards, and the module's present state.

    FSDP2 can set the action after a forward pass, but not return the setting; and it records the order of forward
    passes for the gathers of the next backward pass. Both are read from private parts, as in torch 2.11 to 2.14.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._state = module, module._get_fsdp_state()
        # as in the first forward pass, outermost module first: this call decides about the root
        self._state._lazy_init()
        groups = getattr(self._state, "_fsdp_param_groups", None) or [self._state._fsdp_param_group]
        self._groups = [each for each in groups if each is not None]
        self._order = self._state._comm_ctx.post_forward_order
        self._passes = [len(each._post_forward_indices) for each in self._groups], len(self._order)
        self._after_forward = [each.post_forward_mesh_info for each in self._groups]
        self._was_whole = [each.is_unsharded for each in self._groups]

    def gather(self) -> None:
        """Gather the module's present weights, and keep the weights whole after forward passes."""
        self._module.reshard()
        self._module.unshard()
        for each in self._groups:
            each.post_forward_mesh_info = None

    def go_back(self) -> None:
        """Restore the sharded state, as if no forward pass had run."""
        self._state._state_ctx.iter_forward_root = None  # left over from a failed forward pass
        indices, passes = self._passes
        del self._order[passes:]
        for each, after_forward, was_whole, index in zip(
            self._groups, self._after_forward, self._was_whole, indices, strict=True
        ):
            each.post_forward_mesh_info = after_forward
            del each._post_forward_indices[index:]
            if not was_whole:
                each._to_sharded()
