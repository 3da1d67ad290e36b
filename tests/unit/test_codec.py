"""Values to bytes and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from colocate._definitions import codec as codec_module
from colocate.wire import pack, unpack

LARGE = 1 << 14  # elements: always out of band

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.uint16, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]


def there_and_back(value: Any, device: str | None = None) -> Any:
    return unpack(pack(value).copy(), device)


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    """Of every dtype and shape; nothing is copied, neither by encoding nor by decoding."""
    for shape in ((), (0,), (3, 0, 2), (2, 3), (64, 257)):
        tensor = torch.randint(0, 2, shape).to(dtype)
        result = there_and_back(tensor)
        assert type(result) is torch.Tensor
        assert (result.dtype, result.shape, bits(result)) == (dtype, tensor.shape, bits(tensor))
    tensor = torch.zeros(LARGE).to(dtype)
    packed = pack({"x": [tensor]})
    assert [address(b) for b in packed.buffers] == [tensor.data_ptr()]
    assert len(packed.data) < 300
    own = packed.copy()
    assert unpack(own)["x"][0].data_ptr() == address(own.buffers[0])


def test_layouts() -> None:
    """What isn't contiguous arrives so; what is sparse or has no contents goes the way torch pickles it."""
    base, complex_ = torch.arange(2.0 * LARGE).reshape(2, LARGE), torch.randn(LARGE, dtype=torch.complex64)
    images = torch.randn(2, 8, 40, 40).to(memory_format=torch.channels_last)
    for tensor in (base.T, base[:, ::3], base[1], complex_.conj(), complex_.conj().imag, images):
        result = there_and_back(tensor)
        assert torch.equal(result, tensor)
        assert result.is_contiguous()
    sparse = there_and_back(torch.eye(200).to_sparse().requires_grad_())
    assert (sparse.layout, sparse.requires_grad) == (torch.sparse_coo, True)
    assert torch.equal(sparse.to_dense(), torch.eye(200))
    assert there_and_back(torch.empty(3, device="meta")).is_meta


def test_what_arrives_is_writable_and_its_own() -> None:
    tensor, array = torch.zeros(LARGE), np.zeros(LARGE)
    small = torch.zeros(3)
    got = there_and_back((tensor, array, small))
    for item in got:
        item += 1
    assert not tensor.any()
    assert not array.any()
    assert not small.any()
    assert all(item.all() for item in got)


def test_what_lies_in_memory_once_goes_once() -> None:
    """Expanded tensors and overlapping windows arrive as they are."""
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


def test_jagged_tensors() -> None:
    values, offsets = torch.randn(LARGE, 3), torch.tensor([0, 2, 2, LARGE])
    first = torch.nested.nested_tensor_from_jagged(values, offsets)
    packed = pack((first, first * 2))
    assert values.data_ptr() in [address(b) for b in packed.buffers]
    one, two = unpack(packed.copy())
    assert one.layout is torch.jagged
    assert torch.equal(one.values(), values)
    assert torch.equal(one.offsets(), offsets)
    assert torch.equal((one + two).values(), values * 3)  # They still have one ragged shape.


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


def test_tensordicts_keep_structure_and_batch() -> None:
    inner = TensorDict({"y": torch.ones(4, 2)}, [4])
    batch = TensorDict({"x": torch.randn(4, 3), "sub": inner, "text": NonTensorData("hi")}, [4]).lock_()
    result = there_and_back(batch)
    assert (result.batch_size, result.is_locked, result["text"]) == (torch.Size([4]), True, "hi")
    assert torch.equal(result["sub", "y"], batch["sub", "y"])
    result["x"].zero_()
    assert batch["x"].any()
    stacked = there_and_back(lazy_stack([TensorDict({"x": torch.ones(n)}, []) for n in (2, 3)]))
    assert [t["x"].shape[0] for t in stacked.unbind(0)] == [2, 3]


def test_marked_tensors_go_to_the_receivers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a device: `meta` is one that every machine has."""
    here, there = torch.ones(LARGE), torch.ones(LARGE, 2)
    monkeypatch.setattr(codec_module, "_on_device", lambda tensor: tensor.ndim == 2)
    packed = pack({"here": here, "there": there}).copy()
    assert unpack(packed)["there"].is_cpu
    placed = unpack(packed, "meta")
    assert placed["here"].is_cpu
    assert placed["there"].is_meta
    assert unpack(packed, torch.device("meta"))["there"].is_meta
    assert unpack(packed)["there"].is_cpu  # The device of one unpacking isn't that of the next.


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE),
        np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        np.arange(600.0)[::2],
        np.float64(2.5),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["text", None], dtype=object),
    ],
    ids=["large", "fortran", "strided", "scalar", "dates", "records", "objects"],
)
def test_arrays(array: Any) -> None:
    result = there_and_back(array)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_a_tensor_that_was_sent_stays_torchs_own(size: int) -> None:
    """Of which there was an array, torch would never resize."""
    x = torch.arange(float(size))
    assert torch.equal(unpack(pack([x, x[size // 2 :]]))[1], x[size // 2 :])
    assert x.untyped_storage().resizable()
