"""Models that several ranks share, and what a failed step costs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.suite.probes.trainers import (
    EVERYWHERE,
    STEPS,
    Kind,
    Rebuilding,
    Renewing,
    Trainer,
    Where,
    WorkerBroken,
    train_alone,
)

import colocate
from colocate import ColocatedGroup
from colocate.errors import GroupRestarted, RenewalError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S

NOT_RENEWED: dict[Kind, str] = {
    "fsdp1": r"FullyShardedDataParallel can't be renewed: .* \(FSDP1\) .* by torch\.distributed\.fsdp\.fully_shard",
    "ddp in its own group": r"DistributedDataParallel lies on .* '\d+', which was cut, .* give it ctx\.process_group",
    "own mesh": r"mesh DeviceMesh\(.*\) lies on .* '\d+', which was cut, .* or a mesh of ctx\.device_mesh",
}
"""What says that a model can't be renewed, by how it is shared."""


def mark_long(*values: Any) -> list[Any]:
    """Cases that are much like others: a run that is to be quick leaves them out (`-m "not long"`)."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in values]


Failures = Mapping[int, tuple[int, Where]]
"""By the number of a step: which rank raises in it at first, and where."""
FIRST: Failures = {0: (0, "before"), 1: (1, "backward"), 2: (EVERYWHERE, "backward")}
LATER: Failures = {1: (0, "forward"), 2: (EVERYWHERE, "after"), 3: (1, "backward")}

BOTH = ["ddp", *mark_long("ddp in the default group"), "fsdp2", *mark_long("tp")]


class Renewals(ExecutorCase):
    """DDP, FSDP2 and tensor parallelism after a failed call."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", BOTH)
    @pytest.mark.parametrize("failures", [FIRST, *mark_long(LATER)], ids=["first", "later"])
    def test_failed_steps_are_done_again(self, spawn: Spawn, kind: Kind, failures: Failures) -> None:
        """One rank raises, or all do: the step is repeated, and all that follows is as if nothing had happened."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        before = trainer.identities()
        losses = []
        for number in range(STEPS):
            if number in failures:
                failing, where = failures[number]
                with Gate() as gate:  # a rank that hasn't begun the step when it fails would have no part in it
                    call = trainer.step.submit(number, failing, where, gate.address)
                    gate.wait_for(2)
                    gate.open()
                    error = call.exception(PATIENCE_S)
                assert isinstance(error, RoleError)
                assert error.method == "step"
                assert failing in (error.rank, EVERYWHERE)
                assert "Failure" in str(error)
            losses.append(sum(trainer.step(number)) / 2)
        expected, weights = train_alone()
        assert losses == pytest.approx(expected, rel=1e-4)
        for arrays in trainer.weights():
            for name, value in weights.items():
                np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=1e-5)
        assert trainer.identities() == before
        assert trainer.updates() == [(len(failures), {STEPS})] * 2

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", [*mark_long("ddp", "ddp in the default group", "tp"), "fsdp2"])
    @needs_feature("pipelines")
    def test_weights_of_two_steps(self, spawn: Spawn, kind: Kind) -> None:
        """One rank raises when the others can make their update: then there is no common state to go on with."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        trainer.step(0)
        with group.pipeline():  # or it may have failed before another call can be made
            failing = trainer.step.submit(1, 1, "after")
            queued = trainer.step.submit(1)
        root = failing.exception(PATIENCE_S)
        assert isinstance(root, RoleError)
        error = queued.exception(PATIENCE_S)
        assert isinstance(error, RenewalError)
        assert "rank 0 1, rank 1 0" in str(error)
        assert error.__cause__ == root
        assert group.state == "failed"

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    def test_from_a_checkpoint(self, spawn: Spawn, tmp_path: Path) -> None:
        """A group that restarts goes on from its checkpoint, as if nothing had happened since."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, "ddp")}, on_failure="restart")
        trainer = group.role("trainer", Renewing)
        losses = [sum(trainer.step(number)) / 2 for number in range(2)]
        group.checkpoint(tmp_path / "saved", tag=2)
        assert isinstance(trainer.step.submit(2, 0, "after").exception(PATIENCE_S), RoleError)
        with pytest.raises(GroupRestarted, match="no common state"):
            trainer.step(2)
        assert group.wait_ready(PATIENCE_S) == 2
        losses += [sum(trainer.step(number)) / 2 for number in range(2, STEPS)]
        assert losses == pytest.approx(train_alone()[0], rel=1e-4)

    @needs(OwnProcess)
    def test_without_a_hook(self, spawn: Spawn) -> None:
        """A model that its role doesn't renew fails the group, which says what is missing."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Trainer, "fsdp2")})
        assert "a method renew(self)" in str(self._fail(group))

    @needs(OwnProcess)
    def test_a_hook_that_raises(self, spawn: Spawn) -> None:
        """The hook's error is what the group fails of, after the failure that had led to it."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(WorkerBroken, "fsdp2")})
        error = self._fail(group)
        assert "renew() of role 'trainer' raised" in str(error)
        assert "this model can't go on" in str(error)
        assert "in the backward pass" in str(error)

    @needs(OwnProcess)
    @pytest.mark.parametrize(("kind", "words"), NOT_RENEWED.items(), ids=NOT_RENEWED)
    def test_what_can_not_be_renewed(self, spawn: Spawn, kind: Kind, words: str) -> None:
        """A model of FSDP1, or on a group that its role has made by itself: the error says which, and what to use."""
        pytest.importorskip("torch")
        error = self._fail(spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)}))
        assert re.search(rf"renew\(\) of role 'trainer' raised \S+ConfigError on slot \d .*: {words}", str(error))

    @needs(OwnProcess)
    @pytest.mark.parametrize(
        ("kind", "device", "torch_is_known"),
        [
            *mark_long(("ddp in its own group", None, True), ("ddp", None, False), ("tp", None, False)),
            ("own mesh", "meta", True),
            ("fsdp2", None, False),
        ],
    )
    def test_a_model_made_anew(self, spawn: Spawn, kind: Kind, device: str | None, torch_is_known: bool) -> None:
        """A model that can't be renewed in place takes over the weights and the optimizer's state of the former one."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        role = colocate.role(Rebuilding, kind, device=device, torch_is_known=torch_is_known).on(default_group=True)
        trainer = spawn({"trainer": role}).role("trainer", Rebuilding)
        losses = []
        for number in range(STEPS):
            if number in (1, 3):
                self._fail_during(trainer, number)
            losses.append(sum(trainer.step(number)) / 2)
        expected, weights = train_alone()
        assert losses == pytest.approx(expected, rel=1e-4)
        for arrays in trainer.weights():
            for name, value in weights.items():
                np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=1e-5)
        assert trainer.updates() == [(2, {STEPS})] * 2
        assert trainer.made_anew() == [2, 2]

    def _fail_during(self, trainer: Any, number: int) -> None:
        with Gate() as gate:  # a rank that hasn't begun the step when it fails would have no part in it
            call = trainer.step.submit(number, 0, "backward", gate.address)
            gate.wait_for(2)
            gate.open()
            assert isinstance(call.exception(PATIENCE_S), RoleError)

    def _fail(self, group: ColocatedGroup) -> RenewalError:
        trainer = group.role("trainer", Trainer)
        trainer.step(0)
        with Gate() as gate:  # a rank that hasn't begun the step when it fails would have no part in it
            failing = trainer.step.submit(1, 0, "backward", gate.address)
            queued = trainer.step.submit(1)
            gate.wait_for(2)
            gate.open()
            assert isinstance(failing.exception(PATIENCE_S), RoleError)
        error = queued.exception(PATIENCE_S)
        assert isinstance(error, RenewalError)
        assert group.state == "failed"
        return error
