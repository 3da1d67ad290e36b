"""`ppo.critic`: what the state before each token is worth, and from that each token's advantage."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from colocate import Concat, Reduce, Role, Scatter, method, needs
from colocate_ppo import checkpoint, maths, parallel
from colocate_ppo.forward import response_values
from colocate_ppo.model import ValueModel, Weights, config_from, value_model_from
from colocate_ppo.rollout import Rollout


class Estimates(TypedDict):
    """What the actor and the critic learn from: `advantages` (whitened) and `returns`, `[B, R]` each."""

    advantages: Tensor
    returns: Tensor


@needs("process_group")
class Critic(Role):
    """The value model: the actor's backbone with one output. `load` gives it its model.

    Args:
        lr: Learning rate.
        max_grad_norm: The norm to which gradients are clipped.
    """

    def __init__(self, lr: float = 3e-4, max_grad_norm: float = 1.0) -> None:
        self.lr = lr
        self.max_grad_norm = max_grad_norm

    @method
    def load(self, weights: Weights) -> None:
        """Start from the backbone of a language model; every value is 0 at first."""
        self._adopt(value_model_from(weights))

    @method(dispatch=Scatter("rollout"), collect=Concat())
    @torch.no_grad()
    def values(self, rollout: Rollout) -> Tensor:
        """The value of the state in which each response token was chosen, `[B, R]`."""
        return response_values(self.model, rollout["tokens"], rollout["attention"], rollout["mask"].shape[1])

    @method(dispatch=Scatter("rollout", "scores", "values", "log_probs", "reference_log_probs"), collect=Concat())
    def advantages(
        self,
        rollout: Rollout,
        scores: Tensor,
        values: Tensor,
        log_probs: Tensor,
        reference_log_probs: Tensor,
        gamma: float = 1.0,
        lam: float = 0.95,
        kl_coefficient: float = 0.01,
        kl_estimator: maths.KlEstimator = "k1",
    ) -> Estimates:
        """Advantages and returns of each response token.

        Args:
            rollout: The answers.
            scores: `[B]`, their scores.
            values: `[B, R]`, what `values` said of them.
            log_probs: `[B, R]`, under the actor that sampled them.
            reference_log_probs: `[B, R]`, under the reference.
            gamma: Discount.
            lam: GAE's lambda.
            kl_coefficient: The weight of the KL penalty in the rewards.
            kl_estimator: The estimator of that KL.
        """
        mask = rollout["mask"]
        kl = maths.kl_estimate(log_probs, reference_log_probs, kl_estimator)
        rewards = maths.token_rewards(scores, kl, mask, kl_coefficient)
        advantages, returns = maths.gae(rewards, values, mask, gamma, lam)
        return {"advantages": maths.whiten(advantages, mask, parallel.total(self.ctx)), "returns": returns}

    @method(dispatch=Scatter("rollout", "values", "estimates"), collect=Reduce("sum"))
    def update(
        self,
        rollout: Rollout,
        values: Tensor,
        estimates: Estimates,
        minibatch: int = 64,
        epochs: int = 1,
        clip: float = 0.5,
    ) -> dict[str, float]:
        """Learn the returns.

        Args:
            rollout: The answers.
            values: `[B, R]`, what `values` said of them.
            estimates: What `advantages` said of them.
            minibatch: Rows of a minibatch over all ranks.
            epochs: How often each row is used.
            clip: How far a value may move to any gain.

        Returns:
            Means over the minibatches, as sums of the ranks' parts: `value_loss`, `value_grad_norm`.
        """
        counts = parallel.per_rank(self.ctx, len(values))
        batches = parallel.minibatches(counts, self.ctx.rank, minibatch, epochs)
        means = parallel.Means(len(batches))
        for rows in batches:
            mask = rollout["mask"][rows]
            now = response_values(self.model, rollout["tokens"][rows], rollout["attention"][rows], mask.shape[1])
            losses = maths.value_loss(now, values[rows], estimates["returns"][rows], clip)
            loss = maths.token_mean(losses, mask, parallel.total(self.ctx)(mask.sum()))
            norm = self.learner.step(self.ctx, loss)
            means.add(value_loss=loss, value_grad_norm=norm / self.ctx.world_size)
        return means.values

    @method
    def save(self, directory: str) -> None:
        """Write what `restore` needs into a folder."""
        state = {
            "config": self.model.backbone.config.to_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
        }
        checkpoint.save(self.ctx, directory, state)

    @method
    def restore(self, directory: str) -> None:
        """Go on where `save` was called."""
        state = checkpoint.restore(self.ctx, directory)
        model = ValueModel(config_from(state["config"]))
        model.load_state_dict(state["model"])
        self._adopt(model)
        self.learner.optimizer.load_state_dict(state["optimizer"])

    def _adopt(self, model: ValueModel) -> None:
        self.model = model.to(self.ctx.device)
        self.learner = parallel.Learner(self.model, self.lr, self.max_grad_norm)
