"""Read and load the weights of torch modules in a weight sync (`colocate.torch`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colocate._role.on_mesh import find_fsdp_modules, is_on_mesh
from colocate.errors import ConfigError
from colocate.features.weights.adapters import MergedPart, merge_adapters, unwrap_name
from colocate.features.weights.weights import Weights, WeightSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SMALL, _MOST_GATHERED = 1 << 20, 16 << 20
"""Limits in bytes: of a whole weight that is gathered together with others, and of all weights gathered together."""


class NamedWeights:
    """An iterable of a module's complete weights by name, for the result of a role's `named_weights`."""

    def __init__(
        self,
        module: nn.Module,
        names: Callable[[str], str | None] | None = None,
        adapters: Literal["merged", "alone"] = "merged",
    ) -> None:
        """Use the function `named_weights` to create an object."""
        while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module) or isinstance(
            module, DistributedDataParallel
        ):
            module = inner if isinstance(inner, nn.Module) else cast("nn.Module", module.module)
        if adapters not in ("merged", "alone"):
            raise ConfigError(f"named_weights(adapters={adapters!r}): it is 'merged' or 'alone'")
        if names is not None and not callable(names):
            raise ConfigError(
                f"named_weights(names={names!r}): it is a function of a name, as {{...}}.get; "
                "colocate.sync_weights(names=...) takes a mapping"
            )
        if find_fsdp_modules(module, "FullyShardedDataParallel"):
            raise ConfigError(
                f"{type(module).__name__} is sharded by FullyShardedDataParallel (FSDP1), which hides its parameters; "
                "shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        weights: Mapping[str, Any] | None = _read_adapters(module) if adapters == "alone" else merge_adapters(module)
        if weights is None:
            weights = module.state_dict(keep_vars=True)
        self._tensors: dict[str, torch.Tensor | MergedPart] = {}
        for name, tensor in weights.items():
            name = unwrap_name(name)
            called = name if names is None else names(name)
            if called is not None:
                if _is_extra(name) or not isinstance(tensor, torch.Tensor | MergedPart):
                    raise ConfigError(
                        f"named_weights: {type(module).__name__} has {name!r} in its state, which is no weight "
                        f"({type(tensor).__name__}), and a sync brings weights only: keep it in a buffer. Where the "
                        f"target needs no such state, leave it out: names=lambda name: None if name == {name!r} else "
                        "name"
                    )
                if called in self._tensors:
                    raise ConfigError(f"named_weights(names=...): two weights are called {called!r}, one is {name!r}")
                self._tensors[called] = tensor

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """Shape and dtype of each weight, in order."""
        return {
            name: weight.spec if isinstance(weight, MergedPart) else WeightSpec(tuple(weight.shape), weight.dtype)
            for name, weight in self._tensors.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        together: list[tuple[str, DTensor]] = []
        room = _MOST_GATHERED
        for name, tensor in self._iterate_weights():
            if together and not _fits_bucket(tensor, together[0][1], room):
                yield from _gather_shards(together)
                together, room = [], _MOST_GATHERED
            if _fits_bucket(tensor, together[0][1] if together else tensor, room):
                together.append((name, cast("DTensor", tensor)))
                room -= tensor.nbytes
            else:
                yield name, tensor.full_tensor() if is_on_mesh(tensor) else tensor
        yield from _gather_shards(together)

    def _iterate_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        layer, layer_weights = None, dict[str, torch.Tensor]()
        for name, weight in self._tensors.items():
            if not isinstance(weight, MergedPart):
                yield name, weight.detach()
                continue
            if weight.layer is not layer:
                layer, layer_weights = weight.layer, weight.layer.merged_weights()
            yield name, layer_weights.pop(weight.name).detach()


def _is_extra(name: str) -> bool:
    """Return whether an entry of a module's state comes from `get_extra_state`, and so is never a weight."""
    return name.rpartition(".")[2] == "_extra_state"


def _fits_bucket(tensor: torch.Tensor, other: torch.Tensor, room: int) -> bool:
    """Return whether a weight is small enough, and sharded like another weight, to be gathered together."""
    if not is_on_mesh(tensor) or tensor.nbytes > min(_SMALL, room):
        return False
    from torch.distributed.tensor import Shard

    if tensor.placements != (Shard(0),):
        return False
    mesh = cast("DTensor", other).device_mesh
    return tensor.device_mesh == mesh and mesh.size() > 1 and tensor.dtype == other.dtype


def _gather_shards(shards: list[tuple[str, DTensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather several small weights by one collective, to save the latency of several collectives."""
    if not shards:
        return
    mesh = shards[0][1].device_mesh
    ranks, parts = mesh.size(), []
    for _, shard in shards:
        local_part = shard.to_local()
        part = local_part.new_zeros(
            -(-shard.shape[0] // ranks), *shard.shape[1:]
        )  # The last ranks may have fewer rows, or none.
        part[: len(local_part)] = local_part
        parts.append(part)
    mine = torch.cat([part.flatten() for part in parts])
    whole = mine.new_empty(ranks * len(mine))
    dist: Any = torch.distributed
    # Before torch 2.13, the function has the name `all_gather_into_tensor`.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    # Bytes are gathered, because some backends support fewer dtypes.
    gather(whole.view(torch.uint8), mine.view(torch.uint8), group=mesh.get_group())
    columns = torch.split(whole.view(ranks, -1), [part.numel() for part in parts], 1)
    for (name, shard), part, column in zip(shards, parts, columns, strict=True):
        yield name, column.reshape(ranks * len(part), *shard.shape[1:])[: shard.shape[0]]


def _read_adapters(module: Any) -> dict[str, Any]:
    if not hasattr(module, "peft_config"):
        raise ConfigError(f"named_weights(adapters='alone'): {type(module).__name__} is no model of PEFT's")
    state: dict[str, Any] = importlib.import_module("peft").get_peft_model_state_dict(module)
    return state


def named_weights(
    module: nn.Module,
    names: Callable[[str], str | None] | None = None,
    adapters: Literal["merged", "alone"] = "merged",
) -> NamedWeights:
    """Return the weights of a module for `colocate.sync_weights`: the result of a source's `named_weights(self)`.

    These are the module's parameters and saved buffers, under the names of its `state_dict()`, without the prefixes
    of DDP, `torch.compile` and activation checkpointing. A weight with several names comes
    under each. Weights of a model sharded by FSDP2 or tensor parallelism are gathered one at a time, on the mesh that
    they lie on, small ones of FSDP2's together: all ranks must iterate together, and one large weight at a time
    is whole.

    Args:
        module: The module.
        names: Returns the target's name for each name, or None for a weight to leave out.
        adapters: For a model of PEFT's: "merged" for the weights of the wrapped model, as PEFT's
            `merge_and_unload` makes them, layer by layer; "alone" for the adapters only, under the names of PEFT's
            checkpoints.

    Raises:
        ConfigError: The module is sharded by FSDP1; its state has other data than weights (`get_extra_state`), which
            `names` doesn't leave out; its adapters can't be merged, are disabled, or split a tied weight in
            two; or `adapters="alone"` for a model without any.
    """
    return NamedWeights(module, names, adapters)


def load_weights(module: nn.Module, weights: Weights) -> None:
    """Load the weights of another role into a module; for use in a target's `load_weights(self, weights, version)`.

    All names, shapes and dtypes are compared before anything is written. Floating-point weights are converted to the
    module's dtype. If the method is declared with `@method(shares=True)`, parameters and buffers become
    the source's tensors, and their former memory is freed.

    Args:
        module: The module, on any device; not sharded.
        weights: The argument of the role's method.

    Raises:
        ConfigError: The weights don't fit; nothing was written.
    """
    state = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not _is_extra(name)}
    if sharded := [name for name, tensor in targets.items() if is_on_mesh(tensor)]:
        weights.mismatch = ConfigError(
            f"{type(module).__name__} is sharded ({sharded[0]} and {len(sharded) - 1} more) and takes no whole "
            "weights; nothing was written. Give load_weights a module that isn't, or share the source's model"
        )
        raise weights.mismatch
    weights.check(targets, type(module).__name__)
    with torch.no_grad():
        for name, tensor in weights:
            if weights.shared:
                targets[name].data = tensor
            else:
                targets[name].copy_(tensor)
