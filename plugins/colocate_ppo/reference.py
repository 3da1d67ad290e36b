"""`ppo.reference`: the frozen policy that the actor shouldn't leave too far behind."""

from __future__ import annotations

import torch
from torch import Tensor

from colocate import Concat, Reduce, Role, Scatter, method, needs
from colocate_ppo import checkpoint, maths, parallel
from colocate_ppo.forward import response_log_probs
from colocate_ppo.model import Weights, model_from, weights_of
from colocate_ppo.rollout import Rollout


@needs("process_group")
class Reference(Role):
    """A copy of the actor that isn't trained. `load` gives it its model."""

    @method
    def load(self, weights: Weights) -> None:
        """Become a copy of these weights."""
        self.model = model_from(weights, self.ctx.device).requires_grad_(False)

    @method(dispatch=Scatter("rollout"), collect=Concat())
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        """The log-probability of each response token, `[B, R]`."""
        return response_log_probs(self.model, rollout, temperature)

    @method(dispatch=Scatter("rollout", "log_probs", "reference_log_probs"), collect=Reduce("sum"))
    def kl(
        self, rollout: Rollout, log_probs: Tensor, reference_log_probs: Tensor, estimator: maths.KlEstimator = "k1"
    ) -> float:
        """How far the actor is from here: the mean over all response tokens, as the sum of the ranks' parts."""
        estimate, mask = maths.kl_estimate(log_probs, reference_log_probs, estimator), rollout["mask"]
        return maths.token_mean(estimate, mask, parallel.total(self.ctx)(mask.sum())).item()

    @method
    def save(self, directory: str) -> None:
        """Write what `restore` needs into a folder."""
        checkpoint.save(self.ctx, directory, weights_of(self.model))

    @method
    def restore(self, directory: str) -> None:
        """Go on where `save` was called."""
        state = checkpoint.restore(self.ctx, directory)
        self.load({"config": state["config"], "state": state["state"]})
