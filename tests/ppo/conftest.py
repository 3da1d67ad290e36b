"""Fixtures of the PPO plugin's tests."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import pytest
import torch

from colocate_ppo.actor import Actor
from colocate_ppo.task import Problem, Problems


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread, with results equal to the last bit: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def problems() -> Problems:
    """Return twelve problems of different lengths, whose answers are scored by reasoning-gym."""
    chance = random.Random(0)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 6))) for _ in range(12)]
    return Problems.from_list(
        Problem(
            f"{word} backward", word[::-1], {"answer": word[::-1], "metadata": {"source_dataset": "spell_backward"}}
        )
        for word in words
    )


@pytest.fixture
def actor() -> Actor:
    """Return a tiny actor outside any worker, with weights large enough for answers that differ."""
    actor = Actor(layers=2, hidden=32, heads=2, feed_forward=64, lr=1e-3, warm_up_lr=1e-2)
    with torch.no_grad():
        for parameter in actor.model.module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return actor
