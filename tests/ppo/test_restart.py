"""The PPO job survives a worker's SIGKILL, and logs the metrics of an undisturbed run.

`make test` has the parts: `test_job.py` resumes the job from a checkpoint, and `tests/cli/test_restart.py` kills a
worker of a job.
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
    """An observer that kills a worker while the actor is updated."""

    def __init__(self, group: ColocatedGroup, at: int | None) -> None:
        self.pids = group.run(lambda ctx: os.getpid())
        self.at = at
        self.updates = 0
        self.before: int | None = None  # The count when the death was noticed: observers may be notified late.

    def colocate_group_changed(self, name: str, state: str, cause: BaseException | None) -> None:
        if self.before is None and self.at is not None and self.updates >= self.at:
            self.before = self.updates

    def colocate_call_finished(self, record: CallRecord) -> None:
        """Kill a worker after an update of the critic: the actor's update is next."""
        if (record.role, record.method) == ("critic", "update"):
            self.updates += 1
            if self.updates == self.at:
                os.kill(self.pids[-1], signal.SIGKILL)


def metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int, at: int | None, more: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], int, int]:
    """Return a run's metrics without times, its last generation, and the number of updates of the critic.

    If a worker is killed, only updates after its death are counted.
    """
    folder.mkdir()
    monkeypatch.chdir(folder)
    # An undisturbed run needs processes only for torch's process groups.
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
    """A worker killed in step 3 costs only the work since the checkpoint of step 2, and the metrics are unchanged.

    A checkpoint that is written beside the steps may be incomplete: then the run restarts from its beginning.
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
