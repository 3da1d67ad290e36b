"""The PPO job survives a worker's SIGKILL, and ends with the metrics of a run that nothing has happened to.

In `make test` its parts: `test_job.py` has the job go on from a checkpoint, and `tests/cli/test_restart.py` a job whose
worker is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import CallRecord, ColocatedGroup

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-small.yaml"
CHANGES = [
    "groups.policy.roles.actor.with={layers: 1, hidden: 32, heads: 2, feed_forward: 64, lr: 1e-3, threads: 1}",
    "job.with={task_options: {min_word_len: 3, max_word_len: 5}, warm_up_steps: 2, warm_up_batch: 9, steps: 6,"
    " batch: 16, minibatch: 8, critic_only_steps: 0, actor_ramp: 1, eval_every: 2, eval_problems: 8,"
    " checkpoint_every: 2}",
    "groups.policy.on_failure=restart",
]


class Killer:
    """An observer that ends a worker while an update of the actor runs."""

    def __init__(self, group: ColocatedGroup, at: int | None) -> None:
        self.pids = group.run(lambda ctx: os.getpid())
        self.at = at
        self.updates = 0
        self.before: int | None = None  # updates when it was noticed: observers are told beside the job, maybe late

    def colocate_group_changed(self, name: str, state: str, cause: BaseException | None) -> None:
        """The worker has died."""
        if self.before is None and self.at is not None and self.updates >= self.at:
            self.before = self.updates

    def colocate_call_finished(self, record: CallRecord) -> None:
        """The critic has been updated: the actor is next."""
        if (record.role, record.method) == ("critic", "update"):
            self.updates += 1
            if self.updates == self.at:
                os.kill(self.pids[-1], signal.SIGKILL)


def metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int, at: int | None, more: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], int, int]:
    """What a run logs, without its times; the generation in which it ends; how often the critic was updated.

    After a worker was killed, if one was.
    """
    folder.mkdir()
    monkeypatch.chdir(folder)
    # What nothing happens to needs a process only for torch's process groups.
    processes = str(at is not None or slots > 1).lower()
    changes = [f"pools.main.slots={slots}", f"executor={{use: local, with: {{processes: {processes}}}}}"]
    with colocate.launch(colocate.load_config(EXAMPLE, set=[*CHANGES, *changes, *more])) as job:
        group = job.groups["policy"]
        killer = Killer(group, at)
        job.runtime.observe(killer)
        record = job.run(quiet=True)
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "time")} for row in record.metrics]
        return rows, group.generation, killer.updates - (killer.before or 0)


@pytest.mark.long
@pytest.mark.parametrize(("slots", "waits"), [(1, True), (2, True), (2, False)])
def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, waits: bool) -> None:
    """In step 3, after the checkpoint of step 2: from there it goes on, and does nothing else again.

    Where that was written beside the steps, it may not have been complete: then it goes on from the start.
    """
    undisturbed, generation, updates = metrics(tmp_path / "undisturbed", monkeypatch, slots, None)
    assert generation == 0
    assert [row["step"] for row in undisturbed] == [0, 1, 2, 3, 4, 5, 6]
    each = updates // 6
    assert updates == 6 * each > 0
    at = 2 * each + 1
    more = [f"+job.with.checkpoint_waits={waits}".lower()]
    found, generation, updates = metrics(tmp_path / "killed", monkeypatch, slots, at, more)
    assert generation == 1
    assert found == undisturbed
    assert updates in ((4 * each,) if waits else (4 * each, 6 * each))
