"""Torch's meta device, where tensors have shapes and no values, for code that asks for some all the same.

Known are those that follow from numbers in the program, as in `[x.item() for x in torch.linspace(0, rate, depth)]`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 1024  # elements
_MAKERS = {torch.tensor, torch.arange, torch.linspace, torch.logspace, torch.zeros, torch.ones}
_MAKERS |= {torch.full, torch.eye}
_READERS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__}
_READERS |= {torch.Tensor.__float__, torch.Tensor.__index__}
_SILENT_WRITERS = {
    torch.nn.functional.batch_norm,
    torch.nn.functional.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
}
_MOVERS = {torch.Tensor.cpu, torch.Tensor.to}  # whether that is a copy depends on the device that there will be
_DEEP_COPY: Any = torch.Tensor.__deepcopy__
_LACKING = ("fused", "capturable")  # ways of an optimizer to make a step for which there must be a device

_NO_VALUES = "meta tensor"  # what torch says then
_ADVICE = {
    _NO_VALUES: "nothing has values there: ask for them in a method, or only of tensors that aren't `is_meta`",
    "META device": "it has no generator: take `self.ctx.generator`",
    "compiled with CUDA": "put it on `self.ctx.device`, wherever that is",
}


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Tensors are made there."""
    # Torch looks its makers up once in a process, and finds them by identity; `from_pretrained` has another `linspace`
    # for as long as it makes a model.
    _device_constructors.cache_clear()
    _device_constructors()
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


class _Twin(NamedTuple):
    """A tensor on the host that has the values of one without, as long as that is as it was then."""

    values: torch.Tensor
    storage: torch.UntypedStorage
    view: tuple[Any, ...]
    writes: tuple[int, int]


class _RandomError(Exception):
    """What was made of values is random: it will be another one."""


class _Known(TorchFunctionMode):
    """Has small tensors twice: what is made of them is made of their twins on the host, too, which have values."""

    def __init__(self) -> None:
        super().__init__()
        self._twins = WeakIdKeyDictionary()
        self._writes: dict[int, int] = {}  # by storage: tensors that share one may each have a version of their own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEEP_COPY:  # not its second argument, which has all that was copied before
            made = func(*args, **kwargs)
            if (twin := self._twin(args[0])) is not None:
                self._know(made, twin.clone())
            return made
        leaves = tree_leaves((args, kwargs))
        there = [each for each in leaves if isinstance(each, torch.Tensor) and each.is_meta]
        if not (there or func in _MAKERS):
            return func(*args, **kwargs)
        unknown = [each for each in there if self._twin(each) is None]
        with_values = tree_map_only(torch.Tensor, self._twin_or_itself, (args, kwargs))  # it may be written into
        may_change = [each for each in there if _has_memory(each)]
        versions = [each._version for each in may_change]
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # it needs values
            if len(unknown) == len(there) or func in _MOVERS:
                raise
            try:
                values = _of_values(not unknown, func, *with_values)
            except _RandomError:
                raise error from None
            made = tree_map_only(torch.Tensor, lambda each: each.to("meta"), values)
        else:
            written = (each for each, version in zip(may_change, versions, strict=True) if each._version > version)
            for each in may_change if func in _SILENT_WRITERS else written:
                place = each.untyped_storage()._cdata
                self._writes[place] = self._writes.get(place, 0) + 1
            if unknown or all(each.numel() > _MOST for each in _plain(tree_leaves(made))):
                return made
            values = None
            with contextlib.suppress(Exception):  # the host may lack what a device has
                values = _of_values(True, func, *with_values)
        pairs = [tree_leaves(made), tree_leaves(values)]
        for tensor, twin in zip(*pairs, strict=True) if len(pairs[0]) == len(pairs[1]) else ():
            if _plain([tensor]) and isinstance(twin, torch.Tensor):
                self._know(tensor, twin)
        return made

    def _know(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        if (twin.device.type, twin.shape) == ("cpu", tensor.shape):
            self._twins[tensor] = _Twin(twin, tensor.untyped_storage(), _view(tensor), self._written(tensor))

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor not in self._twins:
            return None
        twin = self._twins[tensor]
        is_there = tensor.untyped_storage()._cdata == twin.storage._cdata and _view(tensor) == twin.view
        return twin.values if is_there and self._written(tensor) == twin.writes else None

    def _written(self, tensor: torch.Tensor) -> tuple[int, int]:
        """How often it has been written into, as far as torch knows, and its storage."""
        return tensor._version, self._writes.get(tensor.untyped_storage()._cdata, 0)

    def _twin_or_itself(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self._twin(tensor)
        return tensor if twin is None else twin


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of its storage a tensor has."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _plain(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of the meta device that may have twins."""
    return [each for each in values if type(each) in (torch.Tensor, torch.nn.Parameter) and _has_memory(each)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is known when a tensor of the meta device, or what it has of memory, is written into."""
    if not tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
        return False
    try:
        tensor.untyped_storage()
    except RuntimeError:  # `torch.func` transforms it
        return False
    return True


def _of_values(on_host: bool, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What something makes of values.

    Raises:
        _RandomError: It makes random numbers.
    """
    if any(isinstance(each, torch.Generator) for each in tree_leaves((args, kwargs))):
        raise _RandomError
    if not on_host:
        return func(*args, **kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    before = torch.get_rng_state()
    try:
        with torch.device("cpu"):
            made = func(*args, **kwargs)
    finally:
        if is_random := not torch.equal(torch.get_rng_state(), before):
            torch.set_rng_state(before)
    if is_random:
        raise _RandomError
    return made


class _Ones(TorchFunctionMode):
    """Has every element be one where somebody asks for a value that isn't known."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if func not in _READERS or _NO_VALUES not in str(error):
                raise
            return func(torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu"))
