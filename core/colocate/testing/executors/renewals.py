"""Models that several ranks share, and what a failed step costs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import GroupRestarted, RenewalError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.trainers import (
    EVERYWHERE,
    RATE,
    Broken,
    Kind,
    Rebuilding,
    Renewing,
    Trainer,
    Where,
    batch,
    make_model,
)
from colocate.testing.waiting import PATIENCE_S

_STEPS = 4

NOT_RENEWED: dict[Kind, str] = {
    "fsdp1": r"FullyShardedDataParallel can't be renewed: .* \(FSDP1\) .* by torch\.distributed\.fsdp\.fully_shard",
    "ddp in its own group": r"DistributedDataParallel lies on .* '\d+', which was cut, .* give it ctx\.process_group",
    "own mesh": r"mesh DeviceMesh\(.*\) lies on .* '\d+', which was cut, .* or a mesh of ctx\.device_mesh",
}
"""What says that a model can't be renewed, by how it is shared."""


def alone() -> tuple[list[float], dict[str, Any]]:
    """The losses and weights of the model trained in one process."""
    import torch

    net = make_model()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    losses = []
    for number in range(_STEPS):
        optimizer.zero_grad()
        x, y = batch(number)
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().numpy() for name, value in net.named_parameters()}


def rarely(*values: Any) -> list[Any]:
    """Cases that are much like others: a run that is to be quick leaves them out (`-m "not long"`)."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in values]


BOTH = ["ddp", *rarely("ddp in the default group"), "fsdp2", *rarely("tp")]
ONE = [*rarely("ddp", "ddp in the default group"), "fsdp2", *rarely("tp")]


class Renewals(ExecutorCase):
    """DDP, FSDP2 and tensor parallelism after a failed call."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", BOTH)
    @pytest.mark.parametrize("where", [*rarely("before", "forward"), "backward"])
    def test_a_failed_step_is_done_again(self, spawn: Spawn, kind: Kind, where: Where) -> None:
        """One rank raises: the step is repeated, and all that follows is as if nothing had happened."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        before = trainer.identities()
        losses = []
        for number in range(_STEPS):
            if number in (1, 3):
                failing = number // 2
                with Gate() as gate:  # a rank that hasn't begun the step when it fails would have no part in it
                    call = trainer.step.submit(number, failing, where, gate.address)
                    gate.wait_for(2)
                    gate.open()
                    error = call.exception(PATIENCE_S)
                assert isinstance(error, RoleError)
                assert (error.rank, error.method) == (failing, "step")
                assert "Failure" in str(error)
            losses.append(sum(trainer.step(number)) / 2)
        expected, weights = alone()
        assert losses == pytest.approx(expected, rel=1e-4)
        for found in trainer.weights():
            for name, value in weights.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5)
        assert trainer.identities() == before
        for renewals, updates in trainer.updates():
            assert renewals == 2
            assert updates == {_STEPS}

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", ["fsdp2", "tp"])
    @pytest.mark.parametrize("fails", ["first", "second"])
    def test_models_of_two_roles(self, spawn: Spawn, kind: Kind, fails: str) -> None:
        """On equal meshes each has groups of its own: a failed step of one is nothing to the other, which can't renew.

        What torch computes with tensors of both is as before.
        """
        pytest.importorskip("torch")
        classes = {name: Renewing if name == fails else Trainer for name in ("first", "second")}
        group = spawn({name: colocate.role(cls, kind) for name, cls in classes.items()})
        roles = [group.role(name, cls) for name, cls in classes.items()]
        losses: list[list[float]] = [[], []]
        for number in range(_STEPS):
            if number in (1, 3):
                self._fail_amid(group.role(fails, Renewing), number)
            for role, found in zip(roles, losses, strict=True):
                found.append(sum(role.step(number)) / 2)
        for found in losses:
            assert found == pytest.approx(alone()[0], rel=1e-4)
        for role, name in zip(roles, classes, strict=True):
            assert role.groups() == [[f"{group.name}/{name}/*"]] * 2
        assert roles[0].distance("second") == roles[1].distance("first") == [0.0, 0.0]

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", ONE)
    def test_the_first_step_is_done_again(self, spawn: Spawn, kind: Kind) -> None:
        """Also where a rank has never been in a forward pass, while the other one waits for it in its first."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        assert isinstance(trainer.step.submit(0, 0, "before").exception(PATIENCE_S), RoleError)
        losses = [sum(trainer.step(number)) / 2 for number in range(_STEPS)]
        assert losses == pytest.approx(alone()[0], rel=1e-4)

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", ONE)
    @pytest.mark.parametrize("where", [*rarely("forward", "after"), "backward"])
    def test_a_step_that_fails_everywhere(self, spawn: Spawn, kind: Kind, where: Where) -> None:
        """All ranks raise alike: nobody waits, and no group is cut, but models are in the middle of a step."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind).on(default_group=True)})
        trainer = group.role("trainer", Renewing)
        losses = [sum(trainer.step(0)) / 2]
        assert isinstance(trainer.step.submit(1, EVERYWHERE, where).exception(PATIENCE_S), RoleError)
        losses += [sum(trainer.step(number)) / 2 for number in range(1, _STEPS)]
        assert losses == pytest.approx(alone()[0], rel=1e-4)
        assert [updates for _, updates in trainer.updates()] == [{_STEPS}, {_STEPS}]

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", ONE)
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
    def test_weights_that_nobody_shares(self, spawn: Spawn) -> None:
        """Ranks with models of their own may have made different numbers of updates."""
        pytest.importorskip("torch")
        trainer = spawn({"trainer": colocate.role(Renewing, "none")}).role("trainer", Renewing)
        assert isinstance(trainer.step.submit(0, 1, "after").exception(PATIENCE_S), RoleError)
        trainer.step(1)
        assert [updates for _, updates in trainer.updates()] in ([{2}, {1}], [{1}, {1}])

    @needs(OwnProcess)
    def test_weights_of_a_later_call(self, spawn: Spawn) -> None:
        """Also in a call that two ranks had begun when an earlier one failed elsewhere."""
        pytest.importorskip("torch")
        group = spawn(
            {
                "trainer": colocate.role(Renewing, "ddp").on(slots=[0, 1]),
                "faulty": colocate.role(Collective).on(slots=[2]),
            },
            slots=3,
        )
        trainer = group.role("trainer", Renewing)
        trainer.step(0)
        with Gate() as gate, Gate() as late:
            first = group.role("faulty", Collective).pass_gate_and_fail.submit(gate.address, True)
            step = trainer.step.submit(1, 1, "after", late.address)
            queued = trainer.step.submit(1)
            gate.wait_for()
            late.wait_for(2)
            gate.open()
            assert isinstance(first.exception(PATIENCE_S), RoleError)
            late.open()
        assert isinstance(step.exception(PATIENCE_S), RoleError)
        assert isinstance(queued.exception(PATIENCE_S), RenewalError)

    @needs(OwnProcess)
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
        losses += [sum(trainer.step(number)) / 2 for number in range(2, _STEPS)]
        assert losses == pytest.approx(alone()[0], rel=1e-4)

    @needs(OwnProcess)
    def test_without_a_hook(self, spawn: Spawn) -> None:
        """A model that its role doesn't renew fails the group, which says what is missing."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Trainer, "fsdp2")})
        assert "a method renew(self)" in str(self._fail(group))

    @needs(OwnProcess)
    def test_a_hook_that_raises(self, spawn: Spawn) -> None:
        """It is what the group fails of, after the failure that had led to it."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Broken, "fsdp2")})
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
            *rarely(("own mesh", None, True), ("ddp in its own group", None, True)),
            *rarely(("ddp", None, False), ("fsdp2", "meta", False), ("tp", None, False)),
            ("own mesh", "meta", True),
            ("fsdp2", None, False),
        ],
    )
    def test_a_model_made_anew(self, spawn: Spawn, kind: Kind, device: str | None, torch_is_known: bool) -> None:
        """One that can't be renewed in place takes over the weights and the optimizer's state of the former one."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        role = colocate.role(Rebuilding, kind, device=device, torch_is_known=torch_is_known).on(default_group=True)
        trainer = spawn({"trainer": role}).role("trainer", Rebuilding)
        losses = []
        for number in range(_STEPS):
            if number in (1, 3):
                self._fail_amid(trainer, number)
            losses.append(sum(trainer.step(number)) / 2)
        expected, weights = alone()
        assert losses == pytest.approx(expected, rel=1e-4)
        for found in trainer.weights():
            for name, value in weights.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5)
        assert trainer.updates() == [(2, {_STEPS})] * 2
        assert trainer.made_anew() == [2, 2]

    def _fail_amid(self, trainer: Any, number: int) -> None:
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
