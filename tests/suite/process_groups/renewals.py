"""Models that several ranks share, after a failed step."""

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
"""The expected error for each kind of model that can't be renewed."""


def mark_long(*values: Any) -> list[Any]:
    """Mark cases as long: a quick run (`-m "not long"`) leaves such similar cases out."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in values]


Failures = Mapping[int, tuple[int, Where]]
"""The rank that raises first in a step, and where, by the step's number."""
FIRST: Failures = {0: (0, "before"), 1: (1, "backward"), 2: (EVERYWHERE, "backward")}
LATER: Failures = {1: (0, "forward"), 2: (EVERYWHERE, "after"), 3: (1, "backward")}

BOTH = ["ddp", *mark_long("ddp in the default group"), "fsdp2", *mark_long("tp")]


class Renewals(ExecutorCase):
    """DDP, FSDP2 and tensor parallelism after a failed call."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", BOTH)
    @pytest.mark.parametrize("failures", [FIRST, *mark_long(LATER)], ids=["first", "later"])
    def test_failed_steps_are_done_again(self, spawn: Spawn, kind: Kind, failures: Failures) -> None:
        """After a failed step, on one rank or all, the repeated step and later ones give the usual results."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        before = trainer.identities()
        losses = []
        for number in range(STEPS):
            if number in failures:
                failing, where = failures[number]
                with Gate() as gate:  # All ranks must have begun the step before the failure.
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
        """A rank that raises after its peers can update leaves no common state, and the group fails."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        trainer.step(0)
        with group.pipeline():  # Otherwise the group may fail before the second call.
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
        """A restarted group continues from its checkpoint, with the losses of an undisturbed run."""
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
        """A model of a role without `renew` fails the group, with an error that names the method."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Trainer, "fsdp2")})
        assert "a method renew(self)" in str(self._fail(group))

    @needs(OwnProcess)
    def test_a_hook_that_raises(self, spawn: Spawn) -> None:
        """An error in `renew` fails the group, and the message also has the original failure."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(WorkerBroken, "fsdp2")})
        error = self._fail(group)
        assert "renew() of role 'trainer' raised" in str(error)
        assert "this model can't go on" in str(error)
        assert "in the backward pass" in str(error)

    @needs(OwnProcess)
    @pytest.mark.parametrize(("kind", "words"), NOT_RENEWED.items(), ids=NOT_RENEWED)
    def test_unrenewable_model_error_names_alternative(self, spawn: Spawn, kind: Kind, words: str) -> None:
        """The error for FSDP1, or for a model on a role's own process group, names the model and the alternative."""
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
        """A model made anew after a failure takes over the weights and the optimizer's state of the old one."""
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
        with Gate() as gate:  # All ranks must have begun the step before the failure.
            call = trainer.step.submit(number, 0, "backward", gate.address)
            gate.wait_for(2)
            gate.open()
            assert isinstance(call.exception(PATIENCE_S), RoleError)

    def _fail(self, group: ColocatedGroup) -> RenewalError:
        trainer = group.role("trainer", Trainer)
        trainer.step(0)
        with Gate() as gate:  # All ranks must have begun the step before the failure.
            failing = trainer.step.submit(1, 0, "backward", gate.address)
            queued = trainer.step.submit(1)
            gate.wait_for(2)
            gate.open()
            assert isinstance(failing.exception(PATIENCE_S), RoleError)
        error = queued.exception(PATIENCE_S)
        assert isinstance(error, RenewalError)
        assert group.state == "failed"
        return error
