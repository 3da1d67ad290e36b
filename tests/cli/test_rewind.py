"""A run whose groups restart: the run rewinds to its last checkpoint, or to its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import ColocateError, GroupRestarted
from colocate.testing.probes.lasting import Lasting
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_run.folder import RunFolder
from colocate_run.recording import _run_until_done
from colocate_run.run import Run, StopSignals
from colocate_run.screen import Screen


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Yield a run of two groups: `policy` restarts on failure, `critic` doesn't."""
    with colocate.connect("local") as runtime:
        pool = runtime.reserve(2)
        roles = {"lasting": colocate.role(Lasting)}
        groups = {
            "policy": pool[:1].spawn(roles, "policy", on_failure="restart"),
            "critic": pool[1:].spawn(roles, "critic"),
        }
        folder, screen = RunFolder.create("demo", tmp_path / "runs"), Screen()
        yield Run("demo", runtime, groups, folder.path, None, folder, screen, StopSignals(screen.show_signal), [])


@pytest.fixture
def policy(run: Run) -> ColocatedGroup:
    return run.groups["policy"]


def fail(group: ColocatedGroup) -> None:
    group._node.fail_group(ColocateError("on purpose", group=group.name))


def write(run: Run, step: int, error: BaseException | None = None, group: str = "policy") -> None:
    """Write a checkpoint of the run with a group's checkpoint inside; raise `error` in the block, if given."""
    with run.checkpoint(step) as directory:
        run.runtime.groups[group].checkpoint(directory / group, tag=step)
        if error is not None:
            raise error


def test_another_group_that_can_not_begin_anew(run: Run, policy: ColocatedGroup) -> None:
    """Without a checkpoint, a job ends with GroupRestarted if another group can't restart; that group keeps working."""
    critic = run.groups["critic"]

    def job() -> None:
        critic.role("lasting", Lasting).add()
        fail(policy)
        policy.role("lasting", Lasting).add()

    with pytest.raises(GroupRestarted) as caught:
        _run_until_done(run, job)
    assert "needs on_failure: restart in every group, which critic lacks" in caught.value.__notes__[0]
    assert critic.role("lasting", Lasting).add() == [2]
    policy.wait_ready(PATIENCE_S)


def test_a_group_that_goes_on_is_restored_too(run: Run, policy: ColocatedGroup) -> None:
    """A rewind also restores a group that didn't fail, without any code of the job."""
    critic, calls = run.groups["critic"], []

    def job() -> None:
        calls.append([group.role("lasting", Lasting).add()[0] for group in (policy, critic)])
        if len(calls) > 1:
            return
        with run.checkpoint(1) as directory:
            for group in policy, critic:
                group.checkpoint(directory / group.name, tag=1)
        critic.role("lasting", Lasting).add(5)
        fail(policy)
        policy.role("lasting", Lasting).add()

    _run_until_done(run, job)
    assert calls == [[1, 1], [2, 2]]


@pytest.mark.parametrize("complete", [True, False], ids=["an earlier one", "none"])
def test_a_group_that_is_back_from_a_checkpoint_which_came_to_nothing(
    run: Run, policy: ColocatedGroup, complete: bool
) -> None:
    """A group that restarted from an incomplete run checkpoint is rewound to the last complete one, or to its start."""
    role, calls = policy.role("lasting", Lasting), []

    def job() -> None:
        calls.append(role.add())
        if len(calls) > 1:
            return
        if complete:
            write(run, 1)
        role.add(5)
        with run.checkpoint(2) as directory:
            policy.checkpoint(directory / "policy", tag=2)
            fail(policy)
            wait_until(lambda: policy.state == "ready", "it is back")
            role.add()

    run.groups = {"policy": policy}
    _run_until_done(run, job)
    assert calls == [[1], [2 if complete else 1]]


def test_a_group_of_the_jobs(run: Run) -> None:
    """A group that the job spawned restarts from the last run checkpoint whose block succeeded."""
    group = run.runtime.reserve(1).spawn({"lasting": colocate.role(Lasting)}, "own", on_failure="restart")
    role = group.role("lasting", Lasting)
    role.add(3)
    write(run, 1, group="own")
    role.add(3)
    with pytest.raises(OSError, match="disk full"):
        write(run, 2, OSError("disk full"), group="own")
    fail(group)
    assert group.wait_ready(PATIENCE_S) == 1
    assert role.add() == [4]
