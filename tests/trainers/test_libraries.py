"""The code for Accelerate and Lightning Fabric in "Bring your trainer" trains, also after a failed step.

`make trainers` runs this where both are installed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import colocate

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-trainer.md"
LIBRARIES = {"Accelerated": ("accelerate", "accelerator"), "Fabricated": ("lightning_fabric", "fabric")}
STEPS = 5
MODULE = """
import torch
from colocate import Role, method
from colocate.torch import renew


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


{code}


class Trainer({name}):
    @method
    def step(self, x, failing=None):
        x = x[self.ctx.rank :: self.ctx.world_size]
        self.optimizer.zero_grad()
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        if failing == self.ctx.rank:
            raise ValueError("a bad batch")
        self.{engine}.backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def renew(self):
        renew(self.net, self.optimizer, self.ctx)


def alone(x):
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for _ in range({steps}):
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
"""


@pytest.fixture(scope="module", params=LIBRARIES)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Write a module with the page's class for a library, and a step; return the module's name."""
    library, engine = LIBRARIES[request.param]
    pytest.importorskip(library)
    code = re.search(rf"^class {request.param}\(Role\):\n(?:(?:    .*)?\n)+", PAGE.read_text(), re.MULTILINE)
    assert code is not None
    name = f"with_{library}"
    folder = tmp_path_factory.mktemp(library)
    text = MODULE.format(code=code[0], name=request.param, engine=engine, steps=STEPS)
    (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield name


def test_a_failed_step_is_done_again(trainer: str) -> None:
    torch = pytest.importorskip("torch")
    module = importlib.import_module(trainer)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with colocate.connect(processes=True) as runtime, runtime.reserve(2, cpus=0) as pool:
        group = pool.spawn({"trainer": colocate.role(module.Trainer).on(env="torchrun")})
        step = group.role("trainer").step
        losses = []
        for number in range(STEPS):
            if number in (1, 3):
                with pytest.raises(colocate.RoleError, match="a bad batch"):
                    step(x, number // 2)
            losses.append(sum(step(x)) / 2)
    assert losses == pytest.approx(module.alone(x), rel=1e-4)
