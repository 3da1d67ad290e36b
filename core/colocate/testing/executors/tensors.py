"""Tests of tensors that are sent or stay on workers, and of forbidden writes into tensors."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase
from colocate.testing.probes.tensors import Tensors


class TensorCase(ExecutorCase):
    """The base class of the areas that need torch."""

    @pytest.fixture
    def torch(self) -> Any:
        """The torch module. The test is skipped if torch isn't installed."""
        return pytest.importorskip("torch")

    @pytest.fixture
    def tensors(self, torch: Any, pair: ColocatedGroup) -> Tensors:
        """The view of the role `Tensors`, which is on both slots."""
        return pair.role("tensors", Tensors)


class TensorResidents(TensorCase):
    """A resident as an argument gives the same result as its collected value."""

    def test_round_trip(self, torch: Any, tensors: Tensors) -> None:
        """Tensors and arrays of every kind are unchanged after they were sent to a role and back."""
        values = [
            *(torch.arange(6).to(getattr(torch, name)) for name in DTYPES),
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.arange(12).reshape(3, 4).t(),
            torch.arange(12)[::2],
            torch.arange(3).expand(2, 3),
            torch.complex(torch.ones(2), torch.zeros(2)),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        ]
        for value in values:
            (back,) = tensors.echo([value])
            assert back.dtype == value.dtype
            if value.is_nested:
                assert all(torch.equal(a, b) for a, b in zip(back.unbind(), value.unbind(), strict=True))
            else:
                assert torch.equal(back.to(torch.complex128), value.to(torch.complex128))
        numpy = pytest.importorskip("numpy")
        for value in (numpy.arange(6.0).reshape(2, 3), numpy.array("text"), numpy.array([{"object": 1}], dtype=object)):
            back = tensors.echo(value)
            assert back.dtype == value.dtype
            assert (back == value).all()

    def test_shared_storage(self, torch: Any, tensors: Tensors) -> None:
        """If a message contains one tensor twice, both copies share one storage after the transfer."""
        whole = torch.arange(4.0)
        one, two = tensors.echo([whole, whole])
        assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()

    def test_no_copy(self, tensors: Tensors) -> None:
        """A resident that is used on its own slot is passed by reference, without a copy."""
        with tensors.make.keep(1000) as resident:
            assert tensors.address_of_rows(resident.ref) == tensors.own_address()


class Memory(TensorCase):
    """No method may write into its arguments or its earlier results."""

    def test_strict_contents(self) -> None:
        """With `strict=True`, contents are compared, which reveals writes that torch's version counter misses."""
        pytest.importorskip("torch")
        with self.connect(strict=True) as runtime, runtime.reserve(1, cpus=0) as pool:
            tensors = pool.spawn({"tensors": colocate.role(Tensors)}).role("tensors", Tensors)
            with tensors.make.keep(2), pytest.raises(RoleError, match="write_behind_the_version changed in place"):
                tensors.write_behind_the_version()


DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
)
