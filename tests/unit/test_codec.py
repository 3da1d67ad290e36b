"""Values to bytes and back."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from colocate._definitions import codec as codec_module
from colocate._definitions.ids import Definition
from colocate.wire import pack, unpack

LARGE = 1 << 14  # elements: always out of band

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def there_and_back(value: Any, device: str | None = None) -> Any:
    return unpack(pack(value).copy(), device)


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3), (LARGE,), (64, 257)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    result = there_and_back(tensor)
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape, bits(result)) == (dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoding_copies_nothing_and_decoding_neither(dtype: torch.dtype) -> None:
    tensor = torch.zeros(LARGE).to(dtype)
    packed = pack({"x": [tensor]})
    assert [address(b) for b in packed.buffers] == [tensor.data_ptr()]
    assert len(packed.data) < 300
    own = packed.copy()
    assert unpack(own)["x"][0].data_ptr() == address(own.buffers[0])


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


def test_layouts_that_are_not_contiguous() -> None:
    base = torch.arange(2.0 * LARGE).reshape(2, LARGE)
    complex_ = torch.randn(LARGE, dtype=torch.complex64)
    for tensor in (
        base.T,
        base[:, ::3],
        base[1],
        base[:1].expand(4, LARGE),
        complex_.conj(),
        complex_.conj().imag,
        torch.randn(2, 8, 40, 40).to(memory_format=torch.channels_last),
    ):
        result = there_and_back(tensor)
        assert torch.equal(result, tensor)
        assert result.is_contiguous() or 0 in tensor.stride()


def test_gradients_stay_behind() -> None:
    leaf = torch.randn(LARGE, requires_grad=True)
    leaf.sum().backward()  # type: ignore[no-untyped-call]
    parameters = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    for tensor in (leaf, leaf * 2, *parameters):
        result = there_and_back(tensor)
        assert type(result) is type(tensor)
        assert result.requires_grad == (tensor.requires_grad and tensor.is_leaf)
        assert (result.grad_fn, result.grad) == (None, None)
        assert torch.equal(result, tensor)


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


def test_what_an_optimizer_trains() -> None:
    """Whatever else has a parameter has the same one, and its memory goes once."""
    model = torch.nn.Linear(LARGE, 1)
    model.weight.is_ours = True  # type: ignore[attr-defined]  # as libraries set them
    optimizer = torch.optim.SGD(model.parameters())
    packed = pack([model.weight, optimizer, model, lambda: model.bias])
    assert packed.nbytes < 4 * LARGE + 5000
    weight, optimizer, model, bias = unpack(packed.copy())
    assert weight is model.weight is optimizer.param_groups[0]["params"][0]
    assert bias() is model.bias is optimizer.param_groups[0]["params"][1]
    assert weight.is_ours


def test_lazy_modules() -> None:
    model = there_and_back(torch.nn.Sequential(torch.nn.LazyLinear(3, dtype=torch.float64), torch.nn.LazyBatchNorm1d()))
    assert [each.dtype for each in model[0].parameters()] == [torch.float64] * 2
    model = there_and_back([model, *model.parameters()])[0]
    model[1].to(torch.float64)
    assert model(torch.ones(2, 5, dtype=torch.float64)).shape == (2, 3)
    assert type(model[0]) is torch.nn.Linear


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


def test_other_layouts_go_the_way_torch_pickles_them() -> None:
    sparse = torch.eye(200).to_sparse().requires_grad_()
    result = there_and_back(sparse)
    assert result.layout is torch.sparse_coo
    assert result.requires_grad
    assert torch.equal(result.to_dense(), torch.eye(200))
    assert there_and_back(torch.empty(3, device="meta")).is_meta


class Inner:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


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
        (Inner, lambda v: v.tensor),
        (lambda t: Data(t, "a"), lambda v: v.tensor),
        (lambda t: Frozen(t, np.zeros(3)), lambda v: v.tensor),
        (lambda t: TensorDict({"x": t, "sub": {"y": t[:2]}}, batch_size=[]), lambda v: v["x"]),
        (lambda t: TensorDict({"x": t}, batch_size=[]).lock_(), lambda v: v["x"]),
        (lambda t: functools.partial(max, t), lambda v: v.args[0]),
        (lambda t: lambda: t, lambda v: v()),
    ],
    ids=["object", "dataclass", "attrs", "TensorDict", "locked TensorDict", "partial", "closure"],
)
def test_tensors_inside_objects_are_not_copied(make: Callable[[Any], Any], reach: Callable[[Any], Any]) -> None:
    tensor = torch.arange(float(LARGE))
    packed = pack(make(tensor))
    assert tensor.data_ptr() in [address(b) for b in packed.buffers]
    assert torch.equal(reach(unpack(packed.copy())), tensor)


def test_tensordicts_keep_structure_and_batch() -> None:
    batch = TensorDict(
        {"x": torch.randn(4, 3), "sub": TensorDict({"y": torch.ones(4, 2)}, [4]), "text": NonTensorData("hi")}, [4]
    ).lock_()
    result = there_and_back(batch)
    assert result.batch_size == torch.Size([4])
    assert result.is_locked
    assert result["text"] == "hi"
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_tensors_travel_by_the_cpu() -> None:
    x = torch.arange(LARGE, device="cuda")
    packed = pack({"x": x, "td": TensorDict({"x": x, "sub": {"y": x}}, [], device="cuda"), "cpu": x.cpu()}).copy()
    on_cpu, on_cuda = unpack(packed), unpack(packed, "cuda")
    assert on_cpu["x"].is_cpu
    assert on_cpu["td"].device == torch.device("cpu")
    assert on_cuda["x"].is_cuda
    assert on_cuda["td"]["sub", "y"].is_cuda
    assert on_cuda["cpu"].is_cpu


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE),
        np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        np.arange(600.0)[::2],
        np.zeros((0, 3)),
        np.float64(2.5),
        np.array(3),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["text", None], dtype=object),
    ],
    ids=["large", "fortran", "strided", "empty", "scalar", "0-d", "dates", "records", "objects"],
)
def test_arrays(array: Any) -> None:
    result = there_and_back(array)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


def test_code_of_a_script_is_named() -> None:
    """What can't be imported elsewhere is named, and the value says that its receiver has to know it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Local:\n def double(self, x):\n  return helper(x)\ndef helper(x):\n return 2 * x", namespace)
    packed = pack(namespace["Local"]())
    assert [need.thing for need in packed.needs if isinstance(need, Definition)] == [namespace["Local"]]
    assert type(unpack(packed)) is namespace["Local"]
    assert len(packed.data) < 100


def test_no_torch_is_imported_for_values_without_tensors() -> None:
    code = (
        "import sys; from colocate.wire import pack, unpack\n"
        "class A: pass\n"
        "assert unpack(pack({'a': [1, 2.0, A]}).copy())['a'][2] is A\n"
        "assert not {'torch', 'numpy', 'tensordict'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_a_tensor_that_was_sent_stays_torchs_own(size: int) -> None:
    """Of which there was an array, torch would never resize."""
    x = torch.arange(float(size))
    assert torch.equal(unpack(pack([x, x[size // 2 :]]))[1], x[size // 2 :])
    assert x.untyped_storage().resizable()
