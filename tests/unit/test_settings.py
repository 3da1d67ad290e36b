"""Torch's settings amid role code: what runs there has the usual ones, and the code its own afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from colocate.worker.settings import USUAL, Setting, Settings  # noqa: E402

KEPT: list[Any] = []


@pytest.fixture
def setting() -> Iterator[Setting]:
    """One that is as usual before and after."""
    found = Setting("cpu", in_process=False)
    assert found.now() == USUAL
    yield found
    assert found.now() == USUAL
    assert torch._C._len_torch_function_stack() == 0


def change(setting: Setting) -> Settings:
    """Settings of a role, as its constructor leaves them on."""
    blocks = [torch.inference_mode(), torch.autocast("cpu", torch.float16), torch.autograd.graph.save_on_cpu()]
    for block in blocks:
        block.__enter__()
    KEPT.append(blocks)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_autocast_dtype("cpu", torch.float16)
    own = setting.now()
    setting.have(setting.base)
    return own


@pytest.mark.parametrize("block", ["cpu", "meta"])
@pytest.mark.parametrize("own", [False, True])
def test_amid(setting: Setting, own: bool, block: str) -> None:
    """Whoever has set them, the role for all of its methods or a block of one; another role's own come in between."""
    others = change(setting)
    setting.have(change(setting) if own else USUAL)
    with torch.device(block):
        before: Any = setting.now()
        for _ in range(2):
            with setting.amid():
                assert setting.now() == USUAL
                setting.have(others)
                assert setting.now() == others
                setting.have(setting.base)
                assert setting.now() == USUAL
            assert setting.now() == before
    setting.have(setting.base)


def test_amid_of_modes(setting: Setting) -> None:
    """Autocast, modes that torch asks about each operation, and transforms have to do with the role's own only."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **kwargs or {})

    def product() -> Any:
        return torch.ones(2, 2) @ torch.ones(2, 2)

    def transformed(row: Any) -> Any:
        with setting.amid():
            seen.append(torch.rand(2))  # which a transform would refuse
        return row * 2

    seen: list[Any] = []
    with torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode(), Counting() as counting:
        with setting.amid():
            seen.append(product())
        assert counting.count == 0
        assert product().dtype is torch.bfloat16
        assert counting.count
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.func.vmap(transformed)(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(torch.func.grad(lambda row: transformed(row).sum())(torch.ones(3)), torch.full((3,), 2.0))
    assert [(type(each), each.dtype) for each in seen] == [(torch.Tensor, torch.float32)] * 3
