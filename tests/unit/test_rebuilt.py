"""A model that takes over what another one has, in one process."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from colocate.errors import ConfigError
from colocate.features.process_groups.rebuilt import rebuilt


class Tied(nn.Module):
    """One weight in two places, a buffer that isn't saved, and a part that isn't trained."""

    def __init__(self, seed: int, device: str = "cpu", width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, width, device=device)
        self.frozen = nn.Linear(width, width, device=device)
        self.norm = nn.BatchNorm1d(width, device=device)
        self.head = nn.Linear(width, 5, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), float(seed), device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.head(self.norm(self.frozen(self.embed(x)) * self.scale)))


def _trained(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    net = Tied(seed)
    net.frozen.requires_grad_(False)
    optimizer = torch.optim.Adam([{"params": [net.embed.weight]}, {"params": net.norm.parameters(), "lr": 0.1}])
    _step(net, optimizer)
    net.frozen.eval()
    return net, optimizer


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = net(torch.arange(5)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_goes_on_alike(device: str) -> None:
    """Weights, ties, buffers, modes and the optimizer's state are those of the former one; meta tensors become its."""
    expected, its_optimizer = _trained(1)
    former, optimizer = _trained(1)
    fresh = rebuilt(former, optimizer, lambda: Tied(2, device))
    assert fresh is not former
    places = [{name: each.data_ptr() for name, each in net.named_parameters()} for net in (former, fresh)]
    assert (places[0] == places[1]) == (device == "meta")
    assert fresh.head.weight is fresh.embed.weight
    assert not fresh.frozen.weight.requires_grad
    assert [each.training for each in fresh.modules()] == [each.training for each in former.modules()]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {
        id(each) for each in fresh.parameters() if each.requires_grad
    }
    losses = [_step(expected, its_optimizer) for _ in range(3)]
    assert [_step(fresh, optimizer) for _ in range(3)] == losses


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(2, 2), "other parameters or buffers: bias, embed.weight, "),
        (lambda: Tied(1, width=4), r"embed\.weight of shape \[5, 4\], not shape \[5, 3\]"),
    ],
)
def test_another_model(other: object, words: str) -> None:
    """What it has made is told."""
    former, optimizer = _trained(1)
    with pytest.raises(ConfigError, match=f"the model that `rebuild` has made has {words}.*it has to make it as"):
        rebuilt(former, optimizer, other)  # type: ignore[arg-type]
