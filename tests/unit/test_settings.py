"""Torch's settings amid role code: what runs there has the usual ones, and the code its own afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from colocate.worker.settings import USUAL, Setting, Settings  # noqa: E402

OWN = Settings(grad=False, dtype=torch.float64, device=torch.device("meta"))


@pytest.fixture
def setting() -> Iterator[Setting]:
    """One that is as usual before and after."""
    found = Setting("cpu", in_process=False)
    assert found.now() == USUAL
    yield found
    assert found.now() == USUAL
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("other", [USUAL, OWN], ids=["usual", "own"])
@pytest.mark.parametrize("block", [None, "cpu", "meta"])
@pytest.mark.parametrize("own", [USUAL, OWN], ids=["usual", "own"])
def test_amid(setting: Setting, own: Settings, block: str | None, other: Settings) -> None:
    """Whoever has set them, the role for all of its methods or a block of one; another role's own come in between."""
    setting.have(own)
    with contextlib.nullcontext() if block is None else torch.device(block):
        before: Any = setting.now()
        for _ in range(2):
            with setting.amid():
                assert setting.now() == USUAL
                setting.have(other)
                setting.have(setting.base)
                assert setting.now() == USUAL
            assert setting.now() == before
    setting.have(setting.base)


def test_amid_of_what_raises(setting: Setting) -> None:
    """They are as they were, all the same."""
    with torch.no_grad(), torch.inference_mode():
        with pytest.raises(ValueError, match="on purpose"):
            _fail_amid(setting)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


def _fail_amid(setting: Setting) -> None:
    with setting.amid():
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        raise ValueError("on purpose")
