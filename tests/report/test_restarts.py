"""The cause and the cost of a group's failure, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate import CheckpointRecord
from colocate.errors import RoleError, WorkerDied
from colocate_report.calls import CallLog, describe_loss
from colocate_run.config.secrets import hide_secret_arguments
from colocate_run.environment import describe_origin


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (WorkerDied("", rank=1, signal="SIGKILL"), "worker 1 was killed"),
        (WorkerDied("", rank=2, signal="SIGSEGV"), "worker 2 was ended by SIGSEGV"),
        (WorkerDied("", rank=0, exitcode=3), "worker 0 exited with code 3"),
        (WorkerDied("", rank=0), "worker 0 failed"),
        (RoleError(""), "group policy failed"),
    ],
)
def test_group_loss_is_described(cause: WorkerDied, words: str) -> None:
    assert describe_loss("policy", cause) == words


def test_time_since_last_checkpoint_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("colocate_report.calls.time.time", lambda: clock[-1])
    log = CallLog(lambda group, role, rank: rank)
    log.colocate_group_checkpointed(CheckpointRecord("policy", 1, Path("saved"), 8, 8.0, 10.0, 12.0))
    for moment, state in ((20.0, "failed"), (21.0, "restarting"), (24.0, "ready")):
        clock.append(moment)
        log.colocate_group_changed("policy", state, WorkerDied("", rank=1, signal="SIGKILL"))
    log.colocate_group_changed("policy", "ready", None)
    for saved, lost in (((), 14.0), ((5.0, 15.0, 22.0), 9.0)):
        (found,) = log.list_restarts(saved)
        assert (found.at, found.lost) == (20.0, lost)


def test_how_a_run_was_started_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", "a.yaml", "--set", "pools.main.env.HF_TOKEN=a=b", "--set=x.api_key=abc", "--set", "job.with.n=3"]
    hidden = ["run", "a.yaml", "--set", "pools.main.env.HF_TOKEN=(hidden)", "--set=x.api_key=(hidden)", "--set"]
    assert hide_secret_arguments(command) == [*hidden, "job.with.n=3"]
    monkeypatch.setattr("sys.orig_argv", ["colocate", *command])
    found = describe_origin()
    assert "abc" not in found["command"]
    assert found["command"].endswith("job.with.n=3")
    assert found["host"]
