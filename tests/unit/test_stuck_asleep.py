"""A role that outgrew its budget, beside one whose memory can't sleep: it must be possible to get at it again."""

from __future__ import annotations

import pytest

import colocate
from colocate import Role, method
from colocate.errors import MemoryBudgetError


class Growing(Role):
    """Has 4 MiB, and 12 more once it has grown."""

    def __init__(self) -> None:
        import torch

        self.weights, self.more = torch.zeros(1 << 20), [torch.zeros(0)]

    @method
    def grow(self) -> None:
        import torch

        self.more.append(torch.ones(3 << 20))

    @method
    def shrink(self) -> None:
        self.more.clear()


class Shared(Role):
    """Has 64 KiB that can't sleep."""

    def __init__(self) -> None:
        import torch

        self.memory = torch.zeros(16384).share_memory_()

    @method
    def use(self) -> None:
        """Be awake."""


@pytest.mark.xfail(
    strict=True, raises=MemoryBudgetError, reason="what doesn't fit beside memory that can't sleep is refused for ever"
)
def test_a_role_that_outgrew_its_budget_can_shrink() -> None:
    """By its own method, which is called as ever."""
    pytest.importorskip("torch")
    roles = {"growing": colocate.role(Growing), "shared": colocate.role(Shared)}
    with colocate.connect(processes=True) as runtime, runtime.reserve(1) as pool:
        group = pool.spawn(roles, residency="swap", device_memory="8MiB")
        growing = group.role("growing", Growing)
        with pytest.raises(MemoryBudgetError):
            growing.grow()
        group.role("shared", Shared).use()
        assert growing.shrink() == [None]
