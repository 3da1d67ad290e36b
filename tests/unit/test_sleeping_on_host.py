"""Memory of the host that sleeps: how what trains comes back, and how all else does."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from colocate._role.context import standalone_context  # noqa: E402
from colocate._role.role import methods_of  # noqa: E402
from colocate.worker.hosted import HostedRole  # noqa: E402
from colocate.worker.scope import Scope  # noqa: E402
from colocate.worker.settings import Setting  # noqa: E402
from colocate.worker.sleeping import Sleeper  # noqa: E402
from colocate.worker.store import Store  # noqa: E402

SIDE = 2048
PIECE = 4 * SIDE * SIDE


class Model:
    """A role with five pieces of one size: a model that has trained, with momentum; a frozen one; a cache."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.frozen = torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
        self.cache = torch.ones(SIDE, SIDE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.train()

    def train(self) -> None:
        self.net(torch.ones(1, SIDE)).sum().backward()
        self.optimizer.step()

    def pieces(self) -> list[Any]:
        (state,) = self.optimizer.state.values()
        weight = self.net.weight
        return [weight.detach(), weight.grad, state["momentum_buffer"], self.frozen.weight, self.cache]


@pytest.mark.parametrize(("writes", "of_file"), [(True, 2), (False, 5)])
def test_how_it_comes_back(writes: bool, of_file: int) -> None:
    """What is about to be written is memory of the process's own; all else stays pages of the file."""
    boot: Any = types.SimpleNamespace(device="cpu")
    site: Any = types.SimpleNamespace(boot=boot, store=Store(False, Scope()), roles={}, spill_dir="/var/tmp")
    model = Model()
    setting, ctx = Setting("cpu", in_process=False), standalone_context("model")
    role = site.roles["model"] = HostedRole("model", model, methods_of(Model), ctx, setting)
    before = [piece.clone() for piece in model.pieces()]
    sleeper = Sleeper(site)
    try:
        for _ in range(2):
            assert sleeper.sleep_alone("model") == pytest.approx(5 * PIECE, rel=0.02)
            assert sleeper.in_memory() == 0
            assert sleeper.wake_alone(role, writes=writes) == pytest.approx(5 * PIECE, rel=0.02)
            assert sleeper.in_memory() == pytest.approx(of_file * PIECE, rel=0.02)
            assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
        model.train()
    finally:
        sleeper.close()
