"""A restored run draws the rows of an uninterrupted run, though no `seed=` is given to the engine."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import GroupRestarted
from colocate_rollout import Prompt, Row, Sampling
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer

SAMPLING = Sampling(max_tokens=12)
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"model": LLAMA, "max_rows": 4},
    "vllm": {"model": LLAMA, "kv_cache_memory_bytes": "4MiB", "max_num_seqs": 8},
}


class Strange:
    """A third party's engine."""

    def __init__(self, ctx: colocate.Context) -> None:
        self.version = 0

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Any) -> Iterator[Row]:
        for prompt in prompts:
            for sample, seed in enumerate(prompt.seeds):
                ids = tuple(random.Random(seed).choices(range(100), k=sampling.max_tokens))
                yield Row(prompt.index, sample, ids, (0.0,) * len(ids), "length", ((self.version, len(ids)),))

    def update(self, weights: colocate.Weights, version: int) -> None:
        weights.skip()
        self.version = version

    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def managed(self) -> dict[str, int]:
        return {}

    def abort(self) -> None: ...
    def close(self) -> None: ...


def kill(ctx: colocate.Context) -> None:
    if ctx.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def steps(group: colocate.ColocatedGroup, count: int = 2) -> list[list[list[tuple[int, ...]]]]:
    """Return the tokens that steps of a user's own loop draw."""
    found = []
    for _ in range(count):
        if "trainer" in group.roles:
            colocate.sync_weights(group.role("trainer"), group.role("rollout"))
        answers = group.role("rollout").generate(PROMPTS[:3], 2, sampling=SAMPLING)
        found.append([[row.token_ids for row in rows] for rows in answers])
    return found


@pytest.mark.long
@pytest.mark.parametrize("engine", [*ENGINES, "strange"])
def test_resumed_and_killed(engine: str, tmp_path: Path) -> None:
    """A group that is restored in place, after a kill or as a new group draws the same rows as the run that continues.

    The group with a third party's engine has no trainer.
    """
    if engine == "strange":
        roles: dict[str, Any] = {"rollout": colocate.role("rollout.engine", engine=Strange)}
    else:
        pytest.importorskip(engine)
        roles = {
            "trainer": colocate.role(Trainer, LLAMA),
            "rollout": colocate.role("rollout.engine", engine=engine, **ENGINES[engine]),
        }
    with colocate.connect(processes=True, seed=3) as runtime, runtime.reserve(slots=2) as pool:
        with pool.spawn(roles, name="loop", on_failure="restart") as group:
            before = steps(group)
            group.checkpoint(tmp_path / "one")
            after = steps(group)
            assert len({*map(str, before + after)}) == 4
            group.restore(tmp_path / "one")
            group.run(str)
            assert steps(group) == after
            with pytest.raises(GroupRestarted):
                group.run(kill)
            group.wait_ready()
            group.run(str)
            assert steps(group) == after
        with pool.spawn(roles, name="loop", restore=tmp_path / "one") as group:
            group.run(str)
            assert steps(group) == after
