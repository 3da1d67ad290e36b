"""Renews the process groups of torch models after a failed call (`colocate.torch.renew`).

This module uses private parts of torch, and only in tested versions of torch. (Other private parts that process
groups need are used in `torch_groups.py` and `books.py`.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colocate._role.context import Context, context
from colocate._role.on_mesh import find_fsdp_modules, is_on_mesh
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)
_KNOWN = ("2.11", "2.12", "2.13", "2.14")
"""Versions of torch with renewal in place: `make versions` runs the suite's renewals there."""


def renew(
    module: M,
    optimizer: torch.optim.Optimizer | None = None,
    ctx: Context | None = None,
    rebuild: Callable[[], M] | None = None,
) -> M:
    """Renew a model's process groups after the former ones were cut (aborted). Call this in a role's `renew(self)`.

    The parameters are the same tensors afterwards, with their values, and the optimizer's state stays as it is. Results
    of the failed step are lost: gradients, including gradients accumulated under `no_sync`, and the state of a
    communication hook. All ranks of the role call this, in the same order for several models.

    If the model uses process groups that the role has made itself, or torch's version isn't supported in place,
    `rebuild` makes the model again. The new parameters and the optimizer get the former state on this rank, shard by
    shard.

    Args:
        module: Wrapped by `DistributedDataParallel`, sharded by `fully_shard` (FSDP2), or with parameters on a mesh of
            `ctx.device_mesh()` (tensor parallelism); also several of them in one.
        optimizer: The model's optimizer; its gradients and state are renewed as well.
        ctx: The role's context; by default the context of the running role code.
        rebuild: Makes the model as before, with groups and meshes. On the meta device this takes no memory
            beside the former model's, otherwise that of a second one until `renew` returns.

    Returns:
        The module, or the result of `rebuild` if called. Its parameters are other ones then, which the optimizer has
        in place of the former; other holders of those (a moving average, a scheduler) keep them.

    Raises:
        ConfigError: The model is sharded by `FullyShardedDataParallel` (FSDP1), or `rebuild` is missing
            although it is needed, or has made another model.
    """
    if find_fsdp_modules(module, "FullyShardedDataParallel"):
        raise ConfigError(
            f"{type(module).__name__} can't be renewed: FullyShardedDataParallel (FSDP1) has no way to go on with "
            "other process groups; shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    ctx = context() if ctx is None else ctx
    ctx._groups().make_again(ctx)
    try:
        _renew_in_place(module, optimizer)
    except _NotRenewable as error:
        if rebuild is None:
            raise ConfigError(f"{type(module).__name__} can't be renewed in place: {error}") from error.__cause__
        from colocate.features.process_groups.rebuilt import rebuild_model

        module = rebuild_model(module, optimizer, rebuild)
    module.zero_grad(set_to_none=True)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    return module


class _NotRenewable(Exception):
    """Raised if a model can't be renewed in place; the text is the reason."""


def _renew_in_place(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    advice = f"it is known to work with torch {_KNOWN[0]} to {_KNOWN[-1]}, and with others by `rebuild`"
    if ".".join(torch.__version__.split(".")[:2]) not in _KNOWN:
        raise _NotRenewable(
            f"that needs private parts of torch, and nobody has tried it with {torch.__version__}; {advice}"
        )
    try:
        for mesh in {
            id(tensor.device_mesh): tensor.device_mesh for tensor in _mesh_tensors(module, optimizer)
        }.values():
            _look_up_groups(mesh)
        _reset_sharded(find_fsdp_modules(module, "FSDPModule"))
        for submodule in module.modules():
            if isinstance(submodule, DistributedDataParallel):
                wrapped: Any = submodule
                former = wrapped.process_group
                wrapped._update_process_group(_resolve_group(str(former.group_name), "DistributedDataParallel"))
                # Update copies of the attribute, too, because `torch.compile` wraps models in functions with copies.
                for copy in gc.get_referrers(former):
                    if isinstance(copy, dict) and copy.get("process_group") is former:
                        copy["process_group"] = wrapped.process_group
    except AttributeError as error:
        raise _NotRenewable(
            f"that needs parts of torch which {torch.__version__} hasn't ({error}); {advice}"
        ) from error


def _resolve_group(name: str, what: str) -> Any:
    """Return the current process group with the name of a former group."""
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        raise _NotRenewable(
            f"{what} lies on the process group {name!r}, which was cut, and which colocate can't make again: give it "
            "ctx.process_group(), or a mesh of ctx.device_mesh(), or say how it is made by `rebuild`"
        ) from None


def _mesh_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[DTensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if is_on_mesh(tensor):
            yield tensor
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if is_on_mesh(value):
                yield value


def _look_up_groups(mesh: DeviceMesh) -> None:
    """Update a mesh's table of groups, which compiled code uses, to the current groups of the same names."""
    root = mesh._get_root_mesh()
    for one_mesh in (root, mesh):
        for name in one_mesh._dim_group_names:
            root._pg_registry[name] = _resolve_group(str(name), f"mesh {one_mesh}")


def _reset_sharded(modules: list[Any]) -> None:
    """Reset FSDP2's state, so that the next step starts from the shards with the current groups of all meshes."""
    states = [module._get_fsdp_state() for module in modules]
    for state in states:
        for params in _param_groups(state):
            params._all_gather_result = None  # Nobody waits for this result, because the group was cut.
            for info in (params.mesh_info, params.post_forward_mesh_info):
                if info is not None:
                    _look_up_groups(info.mesh)
                    info.__post_init__()
            for param in params.fsdp_params:
                param.mesh_info.__post_init__()
                if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
                param.unsharded_accumulated_grad = None
    for module, state in zip(modules, states, strict=True):
        if state._is_root:  # Before the first forward pass there is no root, and nothing to reset.
            if hasattr(module, "reset_iter_state"):  # Torch has this method since version 2.13.
                module.reset_iter_state()
            else:
                _reset_iteration(state)
    for module in modules:
        module.reshard()


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups in a module's FSDP state. Since torch 2.12 there may be several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset_iteration(root: Any) -> None:
    """Reset a root module's iteration state in versions of torch that have no `reset_iter_state`."""
    stream = root._device_handle.current_stream()
    comm = root._comm_ctx
    for waited in (getattr(comm, "all_gather_state", None), getattr(comm, "reduce_scatter_state", None)):
        if waited is not None and waited.event is not None:
            stream.wait_event(waited.event)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for params in _param_groups(state):
            params._post_reduce_event = params._all_reduce_state = params._reshard_after_forward_event = None
            params._partial_reduce_output = None
            params._post_forward_indices.clear()
            params._training_state = idle
            params._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
