"""Models that several ranks share, and what a failed step costs them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import RenewalError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.probes.trainers import RATE, Broken, Kind, Renewing, Trainer, Where, batch, make_model
from colocate.testing.waiting import PATIENCE_S

_STEPS = 4


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


class Renewals(ExecutorCase):
    """DDP, FSDP2 and tensor parallelism after a failed call."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("kind", get_args(Kind))
    @pytest.mark.parametrize("where", [where for where in get_args(Where) if where != "after"])
    def test_a_failed_step_is_done_again(self, spawn: Spawn, kind: Kind, where: Where) -> None:
        """One rank raises: the step is repeated, and all that follows is as if nothing had happened."""
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, kind)})
        trainer = group.role("trainer", Renewing)
        before = trainer.identities()
        losses = []
        for number in range(_STEPS):
            if number in (1, 3):
                failing = number // 2
                error = trainer.step.submit(number, failing, where).exception(PATIENCE_S)
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
            # A rank that hasn't begun the step when it fails has no part in it, and nothing is cut then.
            assert renewals == 2 if kind != "ddp" and where != "before" else renewals <= 2
            assert updates == {_STEPS}

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

    def _fail(self, group: ColocatedGroup) -> RenewalError:
        trainer = group.role("trainer", Trainer)
        trainer.step(0)
        failing = trainer.step.submit(1, 0, "backward")
        queued = trainer.step.submit(1)
        assert isinstance(failing.exception(PATIENCE_S), RoleError)
        error = queued.exception(PATIENCE_S)
        assert isinstance(error, RenewalError)
        assert group.state == "failed"
        return error
