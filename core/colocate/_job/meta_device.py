"""Torch's meta device, where tensors have shapes and no values, for code that asks for some all the same.

Known are those that follow from numbers in the program, as in `[x.item() for x in torch.linspace(0, rate, depth)]`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 1024  # elements
_MAKERS = {torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace, torch.zeros, torch.ones}
_MAKERS |= {torch.full, torch.eye}
_READERS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__}
_READERS |= {torch.Tensor.__float__, torch.Tensor.__index__}
_LACKING = ("fused", "capturable")  # ways of an optimizer to make a step for which there must be a device

_NO_VALUES = "meta tensor"  # what torch says then
_ADVICE = {
    _NO_VALUES: "nothing has values there: ask for them in a method, or only of tensors that aren't `is_meta`",
    "META device": "it has no generator: take `self.ctx.generator`",
}


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Tensors are made there."""
    with torch.device("meta"), _Known():
        yield


def advice(error: BaseException) -> str:
    """What to do about an error of torch's that comes of this device; nothing for others."""
    return next((f" ({each})" for text, each in _ADVICE.items() if text in str(error)), "")


def step(optimizer: Any) -> None:
    """Make a step without gradients worth having, and without what the meta device lacks: its state is as large.

    Raises:
        TypeError: Its steps need a closure, and what they keep depends on what that gives.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"a step of {type(optimizer).__name__} needs a closure, and there is none to give to it")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    lacking = [(group, name, group[name]) for group in optimizer.param_groups for name in _LACKING if group.get(name)]
    for group, name, _ in lacking:
        group[name] = False
    try:
        with _Ones():
            optimizer.step()
    finally:
        for group, name, value in lacking:
            group[name] = value


class _Known(TorchFunctionMode):
    """Has small tensors twice: what is made of them is made of their twins on the host, too, which have values."""

    def __init__(self) -> None:
        super().__init__()
        self._twins = WeakIdKeyDictionary()  # and the storage that the tensor had, and how often that had been written
        self._writes: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS and kwargs.get("device") is None:
            # As torch's own mode does, but for what somebody had in the place of one of them when that first looked:
            # `from_pretrained` has another `linspace` for as long as it makes a model.
            kwargs = {**kwargs, "device": "meta"}
        there = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.is_meta]
        unknown = [each for each in there if self._twin(each) is None]
        with_values: Any = tree_map_only(torch.Tensor, self._twin_or_itself, (args, kwargs))
        may_change = _plain(there)
        versions = [each._version for each in may_change]
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, TypeError):  # it needs values
            if len(unknown) == len(there):
                raise
            values = func(*with_values[0], **with_values[1]) if unknown else _on_host(func, *with_values)
            made = tree_map_only(torch.Tensor, lambda each: each.to("meta"), values)
        else:
            written = (each for each, version in zip(may_change, versions, strict=True) if each._version > version)
            for place in {each.untyped_storage()._cdata for each in written}:
                self._writes[place] = self._writes.get(place, 0) + 1
            if unknown or not (there or func in _MAKERS) or all(each.numel() > _MOST for each in _plain(made)):
                return made
            values = None
            with contextlib.suppress(Exception):  # the host may lack what a device has
                values = _on_host(func, *with_values)
        for tensor, twin in zip(_plain(made), filter(torch.is_tensor, tree_leaves(values)), strict=False):
            if (twin.device.type, twin.shape) == ("cpu", tensor.shape):
                storage = tensor.untyped_storage()
                self._twins[tensor] = (twin, storage, self._writes.get(storage._cdata, 0))
        return made

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor not in self._twins:
            return None
        twin, storage, writes = self._twins[tensor]
        is_there = tensor.untyped_storage()._cdata == storage._cdata
        return twin if is_there and writes == self._writes.get(storage._cdata, 0) else None

    def _twin_or_itself(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self._twin(tensor)
        return tensor if twin is None else twin


def _plain(values: Any) -> list[torch.Tensor]:
    """The tensors of the meta device, but those for inference and of other kinds: what is written there isn't told."""
    return [
        each
        for each in tree_leaves(values)
        if type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.is_meta
        and each.layout is torch.strided
        and not each.is_inference()
    ]


def _on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What something makes of values; None where it makes random ones, which will be others."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    before = torch.get_rng_state()
    try:
        with torch.device("cpu"), torch.no_grad():
            made = func(*args, **kwargs)
    finally:
        if is_random := not torch.equal(torch.get_rng_state(), before):
            torch.set_rng_state(before)
    return None if is_random else made


class _Ones(TorchFunctionMode):
    """Has every element be one where somebody asks for a value that isn't known."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if func not in _READERS or _NO_VALUES not in str(error):
                raise
            return func(torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu"))
