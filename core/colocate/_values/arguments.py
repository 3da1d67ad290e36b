"""Where the tensors among a method's arguments are when it runs: on its slot's device, whatever made them."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

from colocate._definitions.codec import is_trained
from colocate._devices.device_copies import Copies
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate._values.leaves import is_collection
from colocate._values.leaving import memories
from colocate._values.records import CopyError, Records, fields
from colocate._values.tree import map_leaves
from colocate.errors import DispatchError
from colocate.gpus import KIND


def placed(arguments: dict[str, Any], device: str, host: Collection[str] = ()) -> dict[str, Any]:
    """The arguments with their tensors on a device. What is there already is the very object that it was.

    Args:
        arguments: By parameter.
        device: What torch calls it.
        host: The parameters whose tensors are on the host instead.
    """
    torch = imported("torch")
    if torch is None:
        return arguments
    there, here = _Moves(torch, device), _Moves(torch, "cpu")
    try:
        return {name: (here if name in host else there).value(value) for name, value in arguments.items()}
    finally:
        there.copies.wait()


def on_device(value: Any, device: str) -> Any:
    """A value with its tensors on a device."""
    torch = imported("torch")
    if torch is None:
        return value
    moves = _Moves(torch, device)
    try:
        return moves.value(value)
    finally:
        moves.copies.wait()


def gpu_is_used() -> bool:
    """Whether this process has used a GPU, so that values in it may be there."""
    torch = imported("torch")
    return torch is not None and bool(getattr(torch, KIND.device).is_initialized())


class _Moves:
    """Moves values to one device: each tensor once, so that two names of one stay two names of one.

    So a model that is moved and its optimizer have the same parameters there.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        self.copies = Copies(self._device)
        self._records = Records(copy.copy)
        self._moved: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of: an id may be used again
        self._memo: dict[int, Any] = {}  # the same for `copy.deepcopy`

    def value(self, value: Any) -> Any:
        return map_leaves(value, self._leaf, _may_hold_tensors)

    def _leaf(self, item: Any) -> Any:
        kind: type = type(item)
        if not _may_hold_tensors(kind):
            return item
        if not (is_collection(kind) or issubclass(kind, (self._torch.Tensor, *_whole(self._torch)))):
            return self._record(item)
        known = self._moved.get(id(item))
        if known is None:
            known = self._moved[id(item)] = item, self._moved_leaf(item, kind)
        return known[1]

    def _moved_leaf(self, item: Any, kind: type) -> Any:
        if isinstance(item, self._torch.Tensor):
            return item if self._is_there(item) else self._moved_tensor(item)
        if is_collection(kind):
            if all(self._is_there(each) for each in memories(item) if isinstance(each, self._torch.Tensor)):
                return item
            moved = item.apply(self._leaf, filter_empty=False, device=None, propagate_lock=True)
            return moved.to(self._device)  # which is there: it only has to say so
        return self._copy(item)

    def _is_there(self, tensor: Any) -> bool:
        there: bool = tensor.device == self._device or tensor.is_meta  # which has no contents to be moved
        return there

    def _moved_tensor(self, tensor: Any) -> Any:
        if not is_trained(tensor):
            return self.copies.of(tensor)
        if isinstance(tensor, self._torch.nn.parameter.UninitializedTensorMixin):
            return type(tensor)(tensor.requires_grad, self._device, tensor.data.dtype)
        moved = self.copies.of(tensor.detach())
        if isinstance(tensor, self._torch.nn.Parameter):
            return self._torch.nn.Parameter(moved, tensor.requires_grad)
        return moved.requires_grad_()

    def _copy(self, whole: Any) -> Any:
        """A copy on the device: the thing itself may be somebody's who uses it where it is."""
        held = _held(whole, self._torch)
        if all(map(self._is_there, held)):
            return whole
        self._memo.update({id(tensor): self._leaf(tensor) for tensor in held})
        return copy.deepcopy(whole, self._memo)

    def _record(self, item: Any) -> Any:
        try:
            # `self.value` with a frame less for each record within another one: they may be nested deep.
            return self._records.of(item, partial(map_leaves, leaf=self._leaf, matters=_may_hold_tensors))
        except CopyError as error:
            raise DispatchError(
                f"an argument has a {type(item).__qualname__} with tensors that aren't on {self._device}, and it can't "
                f"be copied ({error}): give its tensors by themselves, or name the parameter in @method(host=...) and "
                "move them in the method"
            ) from error


@by_type
def _may_hold_tensors(kind: type) -> bool:
    torch = imported("torch")
    return is_collection(kind) or bool(fields(kind)) or issubclass(kind, (torch.Tensor, *_whole(torch)))


def _whole(torch: Any) -> tuple[type, ...]:
    """The types of what is moved as a whole, because it has parameters."""
    return torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler


def _held(whole: Any, torch: Any) -> list[Any]:
    """The tensors of it that have to be where the device is."""
    if isinstance(whole, torch.nn.Module):
        return [*whole.parameters(), *whole.buffers()]
    optimizer = whole if isinstance(whole, torch.optim.Optimizer) else whole.optimizer
    states = (item for state in optimizer.state.values() for name, item in state.items() if name != "step")
    tensors = (item for item in states if isinstance(item, torch.Tensor))
    return [*(each for group in optimizer.param_groups for each in group["params"]), *tensors]
