"""Torch's settings amid role code: the framework's code has the defaults, and role code its own afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from colocate.worker.settings import USUAL, Setting  # noqa: E402


@pytest.fixture
def setting() -> Iterator[Setting]:
    """Yield a setting that is at its defaults before and after."""
    found = Setting("cpu", in_process=False)
    assert found.read_settings() == USUAL
    yield found
    assert found.read_settings() == USUAL
    assert torch._C._len_torch_function_stack() == 0


def test_amid_of_modes(setting: Setting) -> None:
    """Autocast, dispatch modes and transforms of role code don't affect the framework's code, and stay on."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **kwargs or {})

    def product() -> Any:
        return torch.ones(2, 2) @ torch.ones(2, 2)

    def transformed(row: Any) -> Any:
        with setting.with_base_settings():
            seen.append(torch.rand(2))  # a transform would refuse this
        return row * 2

    seen: list[Any] = []
    with torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode(), Counting() as counting:
        with setting.with_base_settings():
            seen.append(product())
        assert counting.count == 0
        assert product().dtype is torch.bfloat16
        assert counting.count
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.func.vmap(transformed)(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(torch.func.grad(lambda row: transformed(row).sum())(torch.ones(3)), torch.full((3,), 2.0))
    assert [(type(each), each.dtype) for each in seen] == [(torch.Tensor, torch.float32)] * 3
