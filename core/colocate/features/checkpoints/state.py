"""Helpers for a role's `save`: a copy of the state in host memory, and writing by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from colocate._role.context import Context, context, second_halves

T = TypeVar("T")


def host_copy(state: T) -> T:
    """Copy a state to host memory. A role's `save` calls this before the `yield`.

    Tensors on a GPU are copied to pinned memory, which torch reuses. Only this rank's part of a DTensor is copied.
    Tied tensors stay tied.

    Args:
        state: Tensors, NumPy arrays and other values in dicts, lists and tuples, as `state_dict()` has them.

    Returns:
        The same structure, independent of the role's later changes.
    """
    copies = _Copies()
    copied: T = copies.copy_value(state)
    copies.synchronize()
    return copied


def save_state(state: Mapping[str, Any], directory: str, ctx: Context | None = None) -> None:
    """Write a state by torch.distributed.checkpoint. Call this in a role's `save`.

    Each rank of the role writes its part. Any number of ranks can load the state later, by
    `torch.distributed.checkpoint.load`. In a checkpoint, this call copies the state (`host_copy`), and all ranks agree
    on a plan. The files are written after `save` has returned, without a process group, and while calls continue
    unless the checkpoint waits. Outside a checkpoint, this call writes the files at once.

    Args:
        state: The role's state, as for `torch.distributed.checkpoint.save`.
        directory: The directory given to `save`, or a folder in it.
        ctx: The role's context; by default the context of the running role code.
    """
    ctx = context() if ctx is None else ctx
    if (halves := second_halves.get()) is None:
        from torch.distributed.checkpoint.state_dict_saver import save

        ranks: dict[str, Any] = {"no_dist": True} if ctx.world_size == 1 else {"process_group": ctx.process_group()}
        save(dict(state), checkpoint_id=directory, **ranks)
        return
    halves_of_state = _save_in_halves(dict(state), directory, ctx)
    next(halves_of_state)
    halves.append(halves_of_state)


def _save_in_halves(state: dict[str, Any], directory: str, ctx: Context) -> Generator[None, None, None]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    is_first, folder = ctx.rank == 0, Path(directory)
    planner, writer = DefaultSavePlanner(), FileSystemWriter(directory)
    planner.set_up_planner(host_copy(state), writer.storage_meta(), is_first)
    writer.set_up_storage_writer(is_first)
    plans = _gather_results(ctx, writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)  # All ranks compute the same plan.
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ctx.rank])
    del state, plans
    yield
    written = writer.write_data(plan, planner)
    written.wait()
    _results_path(folder, ctx.rank).write_bytes(pickle.dumps(written.value()))
    yield  # The generator resumes when all ranks have written.
    if is_first:
        paths = [_results_path(folder, rank) for rank in range(ctx.world_size)]
        # These pickles are safe to load, because ranks of this role have written the files.
        writer.finish(metadata, [pickle.loads(path.read_bytes()) for path in paths])
        for path in paths:
            path.unlink()


def _results_path(folder: Path, rank: int) -> Path:
    return folder / f".written-{rank}"


def _gather_results(ctx: Context, plan: Any) -> list[Any]:
    if ctx.world_size == 1:
        return [plan]
    import torch.distributed as dist

    plans: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(plans, plan, group=ctx.process_group())
    return plans


class _Copies:
    def __init__(self) -> None:
        # The source tensor is stored with the copy, so that no other tensor gets the address, which is part of the key.
        self._done: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._devices: set[torch.device] = set()

    def copy_value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            copied = copy.copy(value)  # `copy.copy` also copies the attribute `_metadata` of a `state_dict()`.
            copied.update((key, self.copy_value(item)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple):
            return type(value)(self.copy_value(item) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        flatten: Any = getattr(tensor, "__tensor_flatten__", None)  # Only wrappers such as DTensor have this.
        if flatten is not None:
            names, metadata = flatten()
            inner = {name: getattr(tensor, name) for name in names}  # Since torch 2.13, one of these is a device mesh.
            inner = {name: self._copy_tensor(it) if isinstance(it, torch.Tensor) else it for name, it in inner.items()}
            clone: torch.Tensor = type(tensor).__tensor_unflatten__(inner, metadata, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
            return clone
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.to("cpu", copy=True)
        lazy = tensor.is_conj(), tensor.is_neg()
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy
        if key not in self._done or not tensor.numel():
            on_host = tensor.device.type == "cpu"
            target = torch.empty_like(tensor, device="cpu", pin_memory=not on_host)
            self._done[key] = tensor, target.copy_(tensor, non_blocking=not on_host)
            if not on_host:
                self._devices.add(tensor.device)
        return self._done[key][1]

    def synchronize(self) -> None:
        for device in self._devices:
            torch.get_device_module(device).current_stream(device).synchronize()
