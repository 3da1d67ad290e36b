"""A role's own model while an engine generates by it: whole on each rank, without dropout, and then as it was."""

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
"""Kinds of PEFT's that look at more than one token, or at more than tokens."""


def check_adapters(module: PreTrainedModel, name: str) -> None:
    """Refuse a model whose adapters aren't part of its layers alone.

    Raises:
        ConfigError: Generated token by token, it would be another one.
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
    """Whether ranks have parts of its weights only."""
    # Nobody has sharded it who hasn't imported that, which takes as long as torch itself.
    tensors = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return bool(_parts(module)) or any(isinstance(each, tensors) for each in module.parameters())


def computes_together(module: PreTrainedModel) -> bool:
    """Whether ranks have parts of weights that FSDP2 doesn't gather: those of tensor parallelism."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate

    gathered = int(any(isinstance(each, FSDPModule) for each in module.modules()))
    shards = [each.placements for each in module.parameters() if isinstance(each, DTensor)]
    return any(sum(not isinstance(place, Replicate) for place in each) > gathered for each in shards)


@contextlib.contextmanager
def whole(module: PreTrainedModel) -> Iterator[None]:
    """In the block a model generates: without dropout, and whole on each rank.

    A rank whose rows end early would keep the others waiting otherwise. However the block ends, the model is as before.
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
    """A part of a model that FSDP2 shards, and how it does that now.

    FSDP2 has a way to say what is done after a forward pass, and none to ask; and it keeps the order of forward passes
    until the next backward pass, which gathers by that. Both are read where torch 2.11 to 2.14 have them.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._state = module, module._get_fsdp_state()
        self._state._lazy_init()  # as the first forward pass does, from the outermost part on: it decides for the root
        groups = getattr(self._state, "_fsdp_param_groups", None) or [self._state._fsdp_param_group]
        self._groups = [each for each in groups if each is not None]
        self._order = self._state._comm_ctx.post_forward_order
        self._passes = [len(each._post_forward_indices) for each in self._groups], len(self._order)
        self._after_forward = [each.post_forward_mesh_info for each in self._groups]
        self._was_whole = [each.is_unsharded for each in self._groups]

    def gather(self) -> None:
        """Have the whole of it, as its weights are now, also after forward passes."""
        self._module.reshard()
        self._module.unshard()
        for each in self._groups:
            each.post_forward_mesh_info = None

    def go_back(self) -> None:
        """Have it sharded as it was, as if nothing had been computed."""
        self._state._state_ctx.iter_forward_root = None  # of a forward pass that failed
        indices, passes = self._passes
        del self._order[passes:]
        for each, after_forward, was_whole, index in zip(
            self._groups, self._after_forward, self._was_whole, indices, strict=True
        ):
            each.post_forward_mesh_info = after_forward
            del each._post_forward_indices[index:]
            if not was_whole:
                each._to_sharded()
