"""Values are encoded as bytes and decoded again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from colocate.wire import pack, unpack

LARGE = 1 << 14  # elements: always out of band

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.uint16, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    """Neither encoding nor decoding copies a tensor."""
    tensor = torch.randint(0, 2, (LARGE,)).to(dtype)
    packed = pack({"x": [tensor]})
    assert [address(b) for b in packed.buffers] == [tensor.data_ptr()]
    assert len(packed.data) < 300
    own = packed.copy()
    result = unpack(own)["x"][0]
    assert result.data_ptr() == address(own.buffers[0])
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


def test_overlapping_tensors_are_sent_once() -> None:
    """Expanded tensors and overlapping windows are sent once, and arrive with their shapes and strides."""
    few, line = torch.arange(3.0), torch.arange(float(LARGE))
    for tensor, most in (
        (few[:1].expand(100_000_000), 500),
        (few[:, None].expand(3, LARGE), 500),
        (line.unfold(0, 100, 1), 4 * LARGE + 500),
        (torch.complex(few, -few).expand(LARGE, 3).conj(), 500),
    ):
        packed = pack(tensor)
        assert packed.nbytes <= most
        result = unpack(packed.copy())
        assert (result.shape, result.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(result.flatten()[:LARGE], tensor.flatten()[:LARGE])


@dataclasses.dataclass
class Data:
    tensor: torch.Tensor
    name: str


@attrs.frozen
class Frozen:
    tensor: torch.Tensor
    array: Any


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (lambda t: Data(t, "a"), lambda v: v.tensor),
        (lambda t: Frozen(t, np.zeros(3)), lambda v: v.tensor),
        (lambda t: TensorDict({"x": t, "sub": {"y": t[:2]}}, batch_size=[]), lambda v: v["x"]),
        (lambda t: TensorDict({"x": t}, batch_size=[]).lock_(), lambda v: v["x"]),
        (lambda t: functools.partial(max, t), lambda v: v.args[0]),
        (lambda t: lambda: t, lambda v: v()),
    ],
    ids=["dataclass", "attrs", "TensorDict", "locked TensorDict", "partial", "closure"],
)
def test_tensors_inside_objects_are_not_copied(make: Callable[[Any], Any], reach: Callable[[Any], Any]) -> None:
    tensor = torch.arange(float(LARGE))
    packed = pack(make(tensor))
    assert tensor.data_ptr() in [address(b) for b in packed.buffers]
    assert torch.equal(reach(unpack(packed.copy())), tensor)


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_a_tensor_that_was_sent_stays_torchs_own(size: int) -> None:
    """A tensor stays resizable after it was sent: torch never resizes a tensor once an array shares its memory."""
    x = torch.arange(float(size))
    assert torch.equal(unpack(pack([x, x[size // 2 :]]))[1], x[size // 2 :])
    assert x.untyped_storage().resizable()
