"""Models of torch that go on after a failed call: `renew`.

What torch has no public way for is done here, for the versions that it was tried with and for no others. (What groups
themselves need of torch is in `_role/torch_groups.py` and `_role/torch_books.py`.)
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colocate._role.adapters import Part, merged, unwrapped
from colocate._role.child_weights import receive_weights as receive_weights
from colocate._role.child_weights import send_weights as send_weights
from colocate._role.context import Context, context
from colocate._role.saved_state import host_copy as host_copy
from colocate._role.saved_state import save_state as save_state
from colocate._role.weights import Weights, WeightSpec
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)
_SMALL, _TOGETHER = 1 << 20, 16 << 20
"""Bytes of a weight, when it is whole, that is gathered with others, and of all of these."""
_KNOWN = ("2.11", "2.12", "2.13", "2.14")
"""Versions of torch in which models are renewed in place: `make versions` runs the suite's renewals there."""


def renew(
    module: M,
    optimizer: torch.optim.Optimizer | None = None,
    ctx: Context | None = None,
    rebuild: Callable[[], M] | None = None,
) -> M:
    """Have a model go on with new process groups, after those that it had were cut: for a role's method `renew(self)`.

    Its parameters are the same tensors afterwards, with their values, and the optimizer's state stays as it is. What
    the step that failed had begun is lost: gradients, also those that were accumulated under `no_sync`, and whatever a
    communication hook keeps. All ranks of the role call it, in the same order for several models.

    Where that can't be, since the model lies on process groups that the role has made by itself, or torch is of a
    version that isn't known here, the model is made once more by `rebuild`: its parameters and the optimizer get what
    the former ones have on this rank, shard by shard.

    Args:
        module: Wrapped by `DistributedDataParallel`, sharded by `fully_shard` (FSDP2), or with parameters on a mesh of
            `ctx.device_mesh()` (tensor parallelism); also several of them in one.
        optimizer: The model's, whose gradients and state are looked at as well.
        ctx: The role's context; by default that of the role whose code runs.
        rebuild: Makes the model as it was made, its groups and meshes too. On the meta device it takes no memory
            beside the former one's, otherwise that of a second one until this returns.

    Returns:
        The module; if `rebuild` was called, what that gave. Its parameters are other ones then, which the optimizer has
        in place of the former; what else holds those (a moving average, a scheduler) keeps them.

    Raises:
        ConfigError: It can't be renewed: it is sharded by `FullyShardedDataParallel` (FSDP1), or `rebuild` is missing
            where it is needed, or has made another model.
    """
    if _of_fsdp(module, "FullyShardedDataParallel"):
        raise ConfigError(
            f"{type(module).__name__} can't be renewed: FullyShardedDataParallel (FSDP1) has no way to go on with "
            "other process groups; shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    ctx = context() if ctx is None else ctx
    if ctx._groups is not None:
        ctx._groups.make_again(ctx)
    try:
        _go_on(module, optimizer)
    except _CannotGoOn as error:
        if rebuild is None:
            raise ConfigError(f"{type(module).__name__} can't be renewed in place: {error}") from error.__cause__
        from colocate._role.rebuilt import rebuilt

        module = rebuilt(module, optimizer, rebuild)
    module.zero_grad(set_to_none=True)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    return module


# To import what torch has for sharded models takes as long as torch itself. A model that is sharded has it imported.


def _is_on_mesh(tensor: object) -> TypeGuard[DTensor]:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def _of_fsdp(module: nn.Module, kind: str) -> list[nn.Module]:
    """Return those parts of a model, itself included, that are of a class of torch's FSDP."""
    sharding: Any = getattr(sys.modules.get("torch.distributed.fsdp"), kind, ())
    return [each for each in module.modules() if isinstance(each, sharding)]


class NamedWeights:
    """A module's weights by name, whole, one at a time: what a role's `named_weights` returns."""

    def __init__(
        self,
        module: nn.Module,
        names: Callable[[str], str | None] | None = None,
        adapters: Literal["merged", "alone"] = "merged",
    ) -> None:
        """Made by `named_weights`."""
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
        if _of_fsdp(module, "FullyShardedDataParallel"):
            raise ConfigError(
                f"{type(module).__name__} is sharded by FullyShardedDataParallel (FSDP1), which hides its parameters; "
                "shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        found: Mapping[str, Any] | None = _adapters(module) if adapters == "alone" else merged(module)
        if found is None:
            found = module.state_dict(keep_vars=True)
        self._tensors: dict[str, torch.Tensor | Part] = {}
        for name, tensor in found.items():
            name = unwrapped(name)
            called = name if names is None else names(name)
            if called is not None and isinstance(tensor, torch.Tensor | Part):
                if called in self._tensors:
                    raise ConfigError(f"named_weights(names=...): two weights are called {called!r}, one is {name!r}")
                self._tensors[called] = tensor

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """Shape and dtype of each, in order."""
        return {
            name: each.spec if isinstance(each, Part) else WeightSpec(tuple(each.shape), each.dtype)
            for name, each in self._tensors.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        together: list[tuple[str, DTensor]] = []
        room = _TOGETHER
        for name, tensor in self._merged():
            if together and not _goes_with(tensor, together[0][1], room):
                yield from _gathered(together)
                together, room = [], _TOGETHER
            if _goes_with(tensor, together[0][1] if together else tensor, room):
                together.append((name, cast("DTensor", tensor)))
                room -= tensor.nbytes
            else:
                yield name, tensor.full_tensor() if _is_on_mesh(tensor) else tensor
        yield from _gathered(together)

    def _merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each as it is, and those of a layer that has adapters with what these add."""
        layer, made = None, dict[str, torch.Tensor]()
        for name, each in self._tensors.items():
            if not isinstance(each, Part):
                yield name, each.detach()
                continue
            if each.layer is not layer:
                layer, made = each.layer, each.layer.whole()
            yield name, made.pop(each.name).detach()


def _goes_with(tensor: torch.Tensor, other: torch.Tensor, room: int) -> bool:
    """Whether a weight is a small one, by rows of one mesh of several ranks as the other is, that there is room for."""
    if not _is_on_mesh(tensor) or tensor.nbytes > min(_SMALL, room):
        return False
    from torch.distributed.tensor import Shard

    if tensor.placements != (Shard(0),):
        return False
    mesh = cast("DTensor", other).device_mesh
    return tensor.device_mesh == mesh and mesh.size() > 1 and tensor.dtype == other.dtype


def _gathered(shards: list[tuple[str, DTensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather several weights by one collective: for small ones its latency is all that counts."""
    if not shards:
        return
    mesh = shards[0][1].device_mesh
    ranks, parts = mesh.size(), []
    for _, each in shards:
        own = each.to_local()
        part = own.new_zeros(-(-each.shape[0] // ranks), *each.shape[1:])  # the last ranks may have fewer rows, or none
        part[: len(own)] = own
        parts.append(part)
    mine = torch.cat([part.flatten() for part in parts])
    whole = mine.new_empty(ranks * len(mine))
    dist: Any = torch.distributed
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of torch before 2.13
    gather(whole.view(torch.uint8), mine.view(torch.uint8), group=mesh.get_group())  # some have fewer kinds of numbers
    columns = torch.split(whole.view(ranks, -1), [part.numel() for part in parts], 1)
    for (name, each), part, column in zip(shards, parts, columns, strict=True):
        yield name, column.reshape(ranks * len(part), *each.shape[1:])[: each.shape[0]]


def _adapters(module: Any) -> dict[str, Any]:
    """What PEFT saves of a model: its adapters, and the modules that were trained beside them."""
    if not hasattr(module, "peft_config"):
        raise ConfigError(f"named_weights(adapters='alone'): {type(module).__name__} is no model of PEFT's")
    found: dict[str, Any] = importlib.import_module("peft").get_peft_model_state_dict(module)
    return found


def named_weights(
    module: nn.Module,
    names: Callable[[str], str | None] | None = None,
    adapters: Literal["merged", "alone"] = "merged",
) -> NamedWeights:
    """Return the weights of a module for `colocate.sync_weights`: what a source's `named_weights(self)` returns.

    They are the module's parameters and the buffers that it saves, under the names of its `state_dict()`, without what
    DDP, `torch.compile` and activation checkpointing put before these. A weight that is there under several names comes
    under each. Of a model that is sharded by FSDP2 or tensor parallelism each is gathered as it comes, on the mesh that
    it lies on, small ones of FSDP2's together: all ranks go through them together, and whole is one large weight at a
    time.

    Args:
        module: The module.
        names: Gives the name that the target has for each, or None for a weight that isn't to come.
        adapters: Of a model of PEFT's: "merged" for the weights of the model that it wraps, as PEFT's
            `merge_and_unload` makes them, layer by layer; "alone" for the adapters only, under the names by which PEFT
            saves them.

    Raises:
        ConfigError: It is sharded by FSDP1; its adapters can't be merged, are disabled, or make two weights of one
            that is tied; or adapters are asked of a model that has none.
    """
    return NamedWeights(module, names, adapters)


def load_weights(module: nn.Module, weights: Weights) -> None:
    """Load the weights of another role into a module: for a target's `load_weights(self, weights, version)`.

    All names, shapes and dtypes are compared before anything is written. Floating-point weights are converted to the
    dtype that the module has. Where the method is declared with `@method(shares=True)`, parameters and buffers become
    the source's tensors, and the memory that they had is free.

    Args:
        module: The module, on whichever device; not sharded.
        weights: What the method was given.

    Raises:
        ConfigError: They don't fit; nothing was written.
    """
    own = {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    if sharded := [name for name, tensor in own.items() if _is_on_mesh(tensor)]:
        weights.mismatch = ConfigError(
            f"{type(module).__name__} is sharded ({sharded[0]} and {len(sharded) - 1} more) and takes no whole "
            "weights; nothing was written. Give load_weights a module that isn't, or share the source's model"
        )
        raise weights.mismatch
    weights.check(own, type(module).__name__)
    with torch.no_grad():
        for name, tensor in weights:
            if weights.shared:
                own[name].data = tensor
            else:
                own[name].copy_(tensor)


class _CannotGoOn(Exception):
    """Why a model can't be renewed in place."""


def _go_on(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Renew a model in place, or raise _CannotGoOn."""
    known = f"it is known to work with torch {_KNOWN[0]} to {_KNOWN[-1]}, and with others by `rebuild`"
    if ".".join(torch.__version__.split(".")[:2]) not in _KNOWN:
        raise _CannotGoOn(
            f"that needs private parts of torch, and nobody has tried it with {torch.__version__}; {known}"
        )
    try:
        for mesh in {id(tensor.device_mesh): tensor.device_mesh for tensor in _tensors(module, optimizer)}.values():
            _look_up_groups(mesh)
        _reset_sharded(_of_fsdp(module, "FSDPModule"))
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):
                wrapped: Any = each
                former = wrapped.process_group
                wrapped._update_process_group(_resolve(str(former.group_name), "DistributedDataParallel"))
                # Functions by which `torch.compile` wraps a model go on, too: as of any, it copies their attributes.
                for copy in gc.get_referrers(former):
                    if isinstance(copy, dict) and copy.get("process_group") is former:
                        copy["process_group"] = wrapped.process_group
    except AttributeError as error:
        raise _CannotGoOn(f"that needs parts of torch which {torch.__version__} hasn't ({error}); {known}") from error


def _resolve(name: str, what: str) -> Any:
    """Return the group that has the name of a former one."""
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        raise _CannotGoOn(
            f"{what} lies on the process group {name!r}, which was cut, and which colocate can't make again: give it "
            "ctx.process_group(), or a mesh of ctx.device_mesh(), or say how it is made by `rebuild`"
        ) from None


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[DTensor]:
    """Yield the tensors of a model and its optimizer that lie on a mesh."""
    for tensor in (*module.parameters(), *module.buffers()):
        if _is_on_mesh(tensor):
            yield tensor
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if _is_on_mesh(value):
                yield value


def _look_up_groups(mesh: DeviceMesh) -> None:
    """A mesh knows its groups by name; compiled code has a table of them."""
    root = mesh._get_root_mesh()
    for each in (root, mesh):
        for name in each._dim_group_names:
            root._pg_registry[name] = _resolve(str(name), f"mesh {each}")


def _reset_sharded(modules: list[Any]) -> None:
    """Have FSDP2 begin its next step from the shards, with the groups that its meshes have now."""
    states = [module._get_fsdp_state() for module in modules]
    for state in states:
        for params in _param_groups(state):
            params._all_gather_result = None  # of a group that was cut: nobody waits for it
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
        if state._is_root:  # nobody knows yet before the first forward pass, which leaves nothing to reset
            if hasattr(module, "reset_iter_state"):  # from torch 2.13 on
                module.reset_iter_state()
            else:
                _reset_iteration(state)
    for module in modules:
        module.reshard()


def _param_groups(state: Any) -> list[Any]:
    """Those of a module: several from torch 2.12 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset_iteration(root: Any) -> None:
    """What `reset_iter_state` does, where there is none."""
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
