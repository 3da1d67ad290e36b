"""Tensors: how they travel and who is told of it, what staying in the workers means for them, and who may write."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase
from colocate.testing.probes.tensors import Tensors


class TensorCase(ExecutorCase):
    """Base of the areas that need torch."""

    @pytest.fixture
    def torch(self) -> Any:
        """The torch module; without it the test is skipped."""
        return pytest.importorskip("torch")

    @pytest.fixture
    def tensors(self, torch: Any, pair: ColocatedGroup) -> Tensors:
        """A role on tensors, on both slots."""
        return pair.role("tensors", Tensors)


class TensorResidents(TensorCase):
    """Using a resident gives what using its collected value gives."""

    def test_round_trip(self, torch: Any, tensors: Tensors) -> None:
        """Tensors of every kind come back as they went, and so do arrays."""
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
        """Two names of one tensor in a message stay two names of one tensor."""
        whole = torch.arange(4.0)
        one, two = tensors.echo([whole, whole])
        assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()

    def test_no_copy(self, tensors: Tensors) -> None:
        """A resident used on its own slot is handed over by reference: no byte moves."""
        with tensors.make.keep(1000) as resident:
            assert tensors.address_of_rows(resident.ref) == tensors.own_address()


class Memory(TensorCase):
    """No method writes into its arguments or what it has returned, and no two ranks share writable memory."""

    def test_strict_contents(self) -> None:
        """With `strict=True` contents are checked too: writes that torch's version counter doesn't see are found."""
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
