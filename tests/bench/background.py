"""A step of GRPO in which waiting for tools is half of the time: generation beside the trainer, and before it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from tests.bench.rows import Row

import colocate
from colocate import ColocatedGroup, First, Role, RoleSpec, Weights, method
from colocate_rollout import Buffer

_RANKS, _ROWS, _TURNS, _STEPS = 2, 32, 4, 12
_STEP_S = 0.15  # of the trainer; the longest row of the rollout takes as long


def _delays() -> list[list[float]]:
    """Of each row, how long each of its turns waits for a tool."""
    rng = random.Random(0)
    found = [[rng.uniform(0.005, 0.05) for _ in range(_TURNS)] for _ in range(_ROWS)]
    longest = max(map(sum, found))
    return [[each * _STEP_S / longest for each in row] for row in found]


class Actor(Role):
    """Trains."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(64, 64)

    @method(collect=First())
    def step(self, rows: list[int]) -> None:
        """Take as long as a step."""
        time.sleep(_STEP_S)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `sync_weights`."""
        yield from colocate.torch.named_weights(self.net)


class Rollout(Role):
    """Plays rows of several turns."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(64, 64)

    def load_weights(self, weights: Weights, version: int) -> None:
        """See `sync_weights`."""
        colocate.torch.load_weights(self.net, weights)

    @method(rows="delays", concurrency=_ROWS)
    async def play(self, delays: list[float]) -> tuple[int, int]:
        """Wait for a tool in each turn; return the turns, and the version of the weights at the first."""
        version = self.ctx.weights_version
        for each in delays:
            async with self.ctx.resting():
                await asyncio.sleep(each)
        return len(delays), version


def rows() -> list[Row]:
    """The times of both, a step, and what of the one beside the trainer is neither a step nor waiting."""
    found: list[Row] = []
    for where, processes in (("threads", False), ("processes", True)):
        took = []
        for background in (False, True):
            roles: dict[str, RoleSpec[Any]] = {
                "actor": colocate.role(Actor),
                "rollout": colocate.role(Rollout).on(background=background),
            }
            with colocate.spawn(roles, slots=_RANKS, processes=processes) as group:
                _train(group, 2, int(background))
                start = time.perf_counter()
                _train(group, _STEPS, int(background))
                took.append((time.perf_counter() - start) / _STEPS)
        part = f"a step of which waiting for tools is half, {where}"
        found.append(Row(part, "staleness 1 beside staleness 0", took[1] / took[0], "x", 0.7))
        found.append(Row(part, "staleness 1: beyond the trainer's own time", (took[1] - _STEP_S) * 1e3, "ms"))
    return found


def _train(group: ColocatedGroup, steps: int, staleness: int) -> None:
    actor, rollout = group.role("actor", Actor), group.role("rollout", Rollout)
    buffer: Buffer[int] = Buffer(_ROWS, staleness)
    version = colocate.sync_weights(actor, rollout).version
    coming = rollout.play.submit(_delays())
    for number in range(steps):
        for turns, made in coming.result():
            buffer.put(turns, made)
        batch = buffer.get(_ROWS, version=version)
        if staleness and number + 1 < steps:
            coming = rollout.play.submit(_delays())
        actor.step(batch)
        if staleness:
            group.pause("rollout", how="keep")
        version = colocate.sync_weights(actor, rollout).version
        if staleness:
            group.resume("rollout")
        elif number + 1 < steps:
            coming = rollout.play.submit(_delays())
    assert not buffer.dropped
