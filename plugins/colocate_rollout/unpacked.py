"""Convert a vLLM model's weights back to transformers' names, unmerged and unsharded.

vLLM's models list the layers that they merge (`packed_modules_mapping`). Layers have the sizes of their parts
(`output_partition_sizes`) and the dimension along which ranks split. The result is compared bit by bit with the
expected weights, so that a misread layout shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from colocate import ConfigError

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a tensor from all ranks of one engine."""


@attrs.frozen
class _Spec:
    """The shape and dtype of a weight, as in `colocate.Weights.specs`."""

    shape: tuple[int, ...]
    dtype: Any


@attrs.frozen(eq=False)
class _Part:
    """A rank's part of a weight.

    Attributes:
        tensor: A view of the part.
        along: The dimension along which ranks split the weight; None if each rank has the whole weight.
        replicas: The number of consecutive ranks with equal parts.
        shape: The whole weight's shape, which vLLM may have padded.
    """

    tensor: Tensor
    along: int | None
    replicas: int
    shape: tuple[int, ...]


class UnpackedWeights:
    """An iterable of a vLLM model's weights under transformers' names, for an engine's `named_weights`.

    Attributes:
        specs: Shape and dtype of each weight, in order.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, Tensor], gather: Gather) -> None:
        """Locate all expected weights in vLLM's model.

        Args:
            model: VLLM's model.
            expected: Tensors with the expected names and shapes.
            gather: Called for each split weight, on all ranks in the same order.

        Raises:
            ConfigError: Some weights can't be located.
        """
        self._gather = gather
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
        self._parts = {name: _make_part(name, model, tensors, expected) for name in expected}
        self.specs = {name: _Spec(part.shape, part.tensor.dtype) for name, part in self._parts.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; callers must not write to the tensors."""
        for name, part in self._parts.items():
            whole = part.tensor
            if part.along is not None:
                whole = torch.cat([*self._gather(whole.contiguous())][:: part.replicas], part.along)
            for dim, size in enumerate(part.shape):
                whole = whole.narrow(dim, 0, size)
            yield name, whole
            del whole


def _make_part(name: str, model: nn.Module, own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> _Part:
    called, index = _find_packed(name, model, own)
    if called is None:  # vLLM may have tied weights, such as head and embedding, under one name only.
        ties = [other for other, weight in expected.items() if weight is expected[name] and other != name]
        called, index = next((match for other in ties if (match := _find_packed(other, model, own))[0]), (None, None))
    if called is None:
        raise _unknown_weight(name, "there is none of that name, nor of one that it could be merged into")
    tensor, layer = own[called].detach(), cast("Any", model.get_submodule(called.rpartition(".")[0]))
    if not tensor.numel() and expected[name].numel():
        raise _unknown_weight(name, "on a CPU vLLM packs matrices where nobody can read them; on a GPU it doesn't")
    replicas = 1
    if index is not None:
        sizes = getattr(layer, "output_partition_sizes", ())
        if sum(sizes) != tensor.shape[0] or index >= len(sizes):
            raise _unknown_weight(name, f"{type(layer).__name__} has merged it in an unknown way")
        tensor = tensor.narrow(0, sum(sizes[:index]), sizes[index])
        replicas = getattr(layer, "num_kv_head_replicas", 1) if index else 1
    along = None
    if getattr(layer, "tp_size", 1) > 1:
        along = getattr(own[called], "input_dim" if hasattr(layer, "input_is_parallel") else "output_dim", None)
    shape = tuple(expected[name].shape)
    whole = [*tensor.shape]
    if along is not None:
        whole[along] *= layer.tp_size // replicas
    if len(whole) != len(shape) or any(size < expected_size for size, expected_size in zip(whole, shape, strict=True)):
        raise _unknown_weight(name, f"vLLM has it as {whole}, and it is {[*shape]}")
    return _Part(tensor, along, replicas, shape)


def _find_packed(name: str, model: nn.Module, own: Mapping[str, Tensor]) -> tuple[str | None, int | None]:
    """Return vLLM's name of a weight (None if missing), and the index in a merged weight (None if unmerged)."""
    if name in own:
        return name, None
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for merged, parts in packed.items():
        for index, part in enumerate(parts):
            called = name.replace(f".{part}.", f".{merged}.")
            if called != name and called in own:
                return called, index
    return None, None


def _unknown_weight(name: str, why: str) -> ConfigError:
    return ConfigError(f"engine 'vllm' can't give the weight {name} back: {why}. Leave `check` out for it")
