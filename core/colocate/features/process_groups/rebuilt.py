"""Rebuilds a model with new process groups, and copies the state of the former model and the optimizer.

This uses only public functions of torch. Each rank copies its own shards, so no rank ever holds more than its part.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from colocate.errors import ConfigError
from colocate.features.process_groups import books

M = TypeVar("M", bound=nn.Module)
_LruCache = type(functools.cache(lambda: None))


def rebuild_model(former: M, optimizer: torch.optim.Optimizer | None, rebuild: Callable[[], M]) -> M:
    """Rebuild a model, copy the former model's state, and point the optimizer to the new parameters.

    A tensor on the meta device is replaced by the former tensor's shard. Any other tensor gets a copy of the values, so
    that users of the new tensor, such as DDP's reducer, stay valid. A model with other tensors is a `ConfigError`.
    """
    former.state_dict(keep_vars=True)  # This makes FSDP2 restore the shards, even in the middle of a step.
    before = _named_tensors(former)
    _forget_layouts()
    fresh = rebuild()
    names = _named_tensors(fresh)
    if before.keys() != names.keys():
        raise _mismatch_error(f"other parameters or buffers: {', '.join(sorted(before.keys() ^ names.keys()))}")
    replaced: dict[int, torch.Tensor] = {}  # The key is the former tensor's id, so that tied tensors stay tied.
    for name, tensor in names.items():
        old = before[name]
        if _local_tensor(tensor).shape != _local_tensor(old).shape or tensor.shape != old.shape:
            shapes = [
                f"shape {[*item.shape]}"
                + (f", {[*_local_tensor(item).shape]} here" if isinstance(item, DTensor) else "")
                for item in (tensor, old)
            ]
            raise _mismatch_error(f"{name} of {shapes[0]}, not {shapes[1]}")
        if id(old) not in replaced:
            replaced[id(old)] = _move_values(old, tensor)
        if replaced[id(old)] is not tensor:
            owner, _, last = name.rpartition(".")
            setattr(fresh.get_submodule(owner), last, replaced[id(old)])
    modes = {name: item.training for name, item in former.named_modules()}
    for name, item in fresh.named_modules():
        item.training = modes.get(name, item.training)
    for mesh in {id(old.device_mesh): old.device_mesh for old in before.values() if isinstance(old, DTensor)}.values():
        books.release_mesh(mesh)
    if optimizer is None:
        return fresh
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(item), item) for item in group["params"]]
    for old in {id(old): old for old in before.values()}.values():
        if old in optimizer.state:
            new, state = replaced[id(old)], optimizer.state.pop(old)
            optimizer.state[new] = {
                name: _place_like(value, new) if isinstance(value, DTensor) else value for name, value in state.items()
            }
    return fresh


def _forget_layouts() -> None:
    """Clear torch's caches of layouts on meshes, because torch treats a rebuilt mesh as equal to the former mesh."""
    for cache in gc.get_objects():
        if type(cache) is _LruCache and cache.__module__.startswith("torch.distributed.tensor"):
            cache.cache_clear()
    for holder, name in (
        (sys.modules.get("torch.distributed.tensor._redistribute"), "clear_redistribute_planner_cache"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
    ):
        clear: Callable[[], None] | None = getattr(holder, name, None)
        if clear is not None:
            clear()


def _mismatch_error(what: str) -> ConfigError:
    return ConfigError(f"the model that `rebuild` has made has {what}; it has to make it as it was")


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _move_values(old: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Copy the former values to the new tensor, or return the former shard if the new tensor is on the meta device."""
    if not into.is_meta:
        _local_tensor(into).copy_(_local_tensor(old))
        return into.requires_grad_(old.requires_grad)
    moved = _place_like(old, into)
    return nn.Parameter(moved, old.requires_grad) if isinstance(into, nn.Parameter) else moved


def _place_like(old: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the former tensor's own shard, on the mesh of the tensor `like`."""
    if not (isinstance(old, DTensor) and isinstance(like, DTensor)):
        return old.detach()
    tensor: DTensor = DTensor.from_local(
        old.to_local().detach(),
        like.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
    return tensor
