"""Share a model among the ranks of a role, as full copies on all ranks (with or without DDP) or as FSDP2's shards.

Functions import libraries only when they build a model, because the imports take a second.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colocate import ColocateError, ConfigError, Context

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")

Parallel: TypeAlias = Literal["none", "ddp", "fsdp2"]
Dtype: TypeAlias = Literal["float32", "bfloat16"]


@attrs.frozen
class Layout:
    """Options that decide how ranks share a model, and the dtype and memory use of computations.

    Attributes:
        parallel: "none": a copy on each rank; gradients are summed in one message after the backward pass. "ddp": a
            copy on each rank; `DistributedDataParallel` sums gradients during the backward pass. "fsdp2": each rank has
            a part of every parameter, of its gradient and of the optimizer's state, by `fully_shard`.
        dtype: The dtype of the passes. Weights and the optimizer's state are float32.
        gradient_checkpointing: Recompute each layer in the backward pass instead of keeping its activations.
    """

    parallel: Parallel = "none"
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False


class SpreadModel:
    """A model that all ranks of a role train together. Under "ddp" and "fsdp2" it starts from rank 0's weights.

    Args:
        ctx: The role's context.
        module: The whole model, on the rank's device.
        layout: How the ranks share the model.

    Raises:
        ConfigError: The role's mesh has other axes than "dp".

    Attributes:
        module: The model; under "fsdp2" its parameters are DTensors.
        wrapped: The module to train: the model, or its `DistributedDataParallel`.
    """

    def __init__(self, ctx: Context, module: nn.Module, layout: Layout) -> None:
        if ctx.mesh.size("dp") != ctx.world_size:
            raise ConfigError(
                f"role {ctx.role!r} has the mesh {dict(ctx.mesh.shape)}, but it splits its rows, and shares its model, "
                "among all of its ranks, which is the mesh that it has without `mesh`"
            )
        self.module = module
        self.layout = layout
        self.wrapped = module
        layers = _find_layers(module)
        self._longest = _longest_length(getattr(module, "config", None))
        if layout.gradient_checkpointing:
            for layer in layers:
                _checkpoint_layer(layer)
        if layout.dtype != "float32" and layout.parallel != "fsdp2":  # FSDP2 has a separate policy for dtypes.
            _set_compute_dtype(module, getattr(torch, layout.dtype))
        if layout.parallel == "fsdp2":
            _broadcast_weights(ctx, module)
            self._shard_layers(ctx, layers)
        elif layout.parallel == "ddp" and any(p.requires_grad and not p.is_meta for p in module.parameters()):
            from torch.nn.parallel import DistributedDataParallel

            # `gradient_as_bucket_view` saves the memory of a copy of all gradients, which no role is charged for.
            self.wrapped = DistributedDataParallel(
                module, process_group=ctx.process_group(), gradient_as_bucket_view=True
            )

    def __call__(self, **inputs: Any) -> Any:
        """Run the model. All ranks must take part if gradients are enabled; otherwise one rank may run alone."""
        # Use DDP only with gradients, because DDP's forward pass sends buffers and expects a backward pass.
        model = self.wrapped if torch.is_grad_enabled() else self.module
        if self._longest is not None and "position_ids" in inputs:
            self.check_length(int(inputs["position_ids"].max()) + 1)
        return model(**inputs)

    def check_length(self, length: int) -> None:
        """Refuse a row so long that long-rope would change the results of all other rows in the pass.

        Args:
            length: The tokens of the longest row, prompt and response together.

        Raises:
            ConfigError: The longest row exceeds the model's first range of positions.
        """
        if self._longest is not None and length > self._longest:
            raise ConfigError(
                f"a row of {length} tokens, prompt and response together: the model's long-rope computes all rows of a "
                f"pass otherwise as soon as one has more than {self._longest}; ask shorter questions, or lower "
                "max_new_tokens"
            )

    @contextlib.contextmanager
    def gather_weights(self) -> Iterator[None]:
        """A context manager that keeps all weights on each rank after the first forward pass in the block.

        Otherwise ranks would gather weights in each pass, and wait for a rank whose answers have all ended early.
        """
        sharded = self._sharded_modules()
        for submodule in sharded:
            submodule.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for submodule in sharded:
                submodule.reshard()
                # The root module stays unsharded after a forward pass, because the next pass begins there.
                submodule.set_reshard_after_forward(submodule in sharded[1:], recurse=False)

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights, unsharded, for `load`. All ranks call this."""
        return {name: gather_tensor(value).clone() for name, value in self.module.state_dict().items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the model. All ranks call this, with equal weights.

        Raises:
            KeyError: The weights belong to another model.
        """
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, mine in self.module.state_dict().items():
            value = weights[name].to(mine.device)
            if isinstance(mine, DTensor):
                value = distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
            mine.copy_(value)

    def _shard_layers(self, ctx: Context, layers: list[nn.Module]) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        computes = getattr(torch, self.layout.dtype)
        policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32)
        mesh = ctx.device_mesh()["dp"]
        for module in (*layers, self.module):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def _sharded_modules(self) -> list[FSDPModule]:
        if self.layout.parallel != "fsdp2":
            return []
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _find_layers(module: nn.Module) -> list[nn.Module]:
    # Imported only when needed, because the import is slow.
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _set_compute_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    _wrap_forward(module, functools.partial(_forward_in_dtype, module, dtype))


def _forward_in_dtype(module: nn.Module, dtype: torch.dtype, /, *args: Any, **named: Any) -> Any:
    with torch.autocast(next(module.parameters()).device.type, dtype):
        return type(module).forward(module, *args, **named)


def _wrap_forward(module: nn.Module, forward: functools.partial[Any]) -> None:
    """Replace a torch module's `forward` by a `functools.partial`; a deep copy gets a partial bound to the copy."""
    # Keep the signature of the module's own `forward`, because transformers' `generate` inspects the parameters.
    module.forward = functools.update_wrapper(forward, module.forward, (), ())


def _longest_length(config: Any) -> int | None:
    """Return the most tokens of a row that leave other rows unchanged in a long-rope model; None for other models."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [section for section in rope.values() if isinstance(section, Mapping)]
    lengths = [
        section["original_max_position_embeddings"] for section in kinds if section.get("rope_type") == "longrope"
    ]
    return min(lengths) if lengths else None


def _checkpoint_layer(layer: nn.Module) -> None:
    """Make a layer recompute activations. Transformers' own option works only in training mode, with dropout."""
    _wrap_forward(layer, functools.partial(_forward_checkpointed, layer))


def _forward_checkpointed(layer: nn.Module, /, *args: Any, **named: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    forward = type(layer).forward
    if not torch.is_grad_enabled():
        return forward(layer, *args, **named)
    return checkpoint(forward, layer, *args, use_reentrant=False, **named)


def _broadcast_weights(ctx: Context, module: nn.Module) -> None:
    if ctx.world_size > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, group=ctx.process_group(), group_src=0)


def check_loaded(ctx: Context, there: T | None) -> T:
    """Return a role's model, or raise an error if no model is loaded.

    Raises:
        ColocateError: The role has no model yet.
    """
    if there is None:
        raise ColocateError(f"role {ctx.role!r} has no model yet: call `load` or `restore` before")
    return there


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on all ranks; return any other tensor detached."""
    gather = getattr(tensor, "full_tensor", None)  # Only DTensors have `full_tensor`.
    return tensor.detach() if gather is None else gather()
