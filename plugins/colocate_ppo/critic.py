"""The role `ppo.critic`, which estimates the value before each token, and each token's advantage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from colocate import Concat, Reduce, Role, Scatter, checks, method, needs
from colocate_ppo import checkpoint, maths
from colocate_ppo.actor import collect_actor_weights
from colocate_ppo.forward import INFERENCE, response_values
from colocate_ppo.learner import Learner
from colocate_ppo.model import ValueModel, Weights, make_value_model
from colocate_ppo.options import BOUND, POSITIVE, Limit, limit_problems, refuse_options
from colocate_ppo.parallel import gather_numbers, make_total, split_minibatches
from colocate_ppo.rollout import Estimates, Rollout
from colocate_ppo.spread import Dtype, Layout, Parallel, SpreadModel, check_loaded

_LIMITS: Mapping[str, Limit] = {"lr": POSITIVE, "max_grad_norm": BOUND}


@checks(lambda options, *_: limit_problems(options, _LIMITS))
@needs("process_group")
class Critic(Role):
    """The value model: the actor's backbone with one output, set by `load`.

    Args:
        lr: Learning rate.
        max_grad_norm: The norm to which gradients are clipped.
        parallel: How the ranks share the model: "none", "ddp" or "fsdp2"; see `Layout`.
        dtype: The dtype of computations. Weights are float32.
        gradient_checkpointing: Recompute layers in the backward pass, which takes less memory and more time.
        skip_nonfinite: Skip and count an update with a non-finite loss or gradient, instead of raising an error.
    """

    def __init__(
        self,
        lr: float = 3e-4,
        max_grad_norm: float = 1.0,
        parallel: Parallel = "none",
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        refuse_options(f"role {self.ctx.role!r}", limit_problems({**locals()}, _LIMITS))
        self.lr = lr
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.layout = Layout(parallel, dtype, gradient_checkpointing)
        self.loaded: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The learner of the loaded model."""
        return check_loaded(self.ctx, self.loaded)

    @property
    def model(self) -> SpreadModel:
        """The loaded value model."""
        return self.learner.model

    def renew(self) -> None:
        """Use new process groups after a failed call."""
        if self.loaded is not None:
            self.loaded.renew_groups()

    def plan(self, roles: Mapping[str, object]) -> None:
        """Load the actor's weights as in `ppo.train`; called by `colocate plan`."""
        self.load(collect_actor_weights(roles))

    @method
    def load(self, weights: Weights) -> None:
        """Copy the backbone of a language model; all values are 0 at first."""
        self._adopt(make_value_model(weights))

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=INFERENCE)
    @torch.no_grad()
    def values(self, rollout: Rollout) -> Tensor:
        """Return the value of the state before each response token, `[B, R]`."""
        return response_values(self.model, rollout["tokens"], rollout["attention"], rollout["mask"].shape[1])

    @method(
        dispatch=Scatter("rollout", "scores", "values", "log_probs", "reference_log_probs"),
        collect=Concat(),
        awake=(),
    )
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
        """Compute the advantage and the return of each response token.

        Args:
            rollout: The answers.
            scores: `[B]`, the scores of the answers.
            values: `[B, R]`, the result of `values`.
            log_probs: `[B, R]`, under the actor that sampled the answers.
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
        return {"advantages": maths.whiten(advantages, mask, make_total(self.ctx)), "returns": returns}

    @method(dispatch=Scatter("rollout", "values", "estimates"), collect=Reduce("sum"))
    def update(
        self,
        rollout: Rollout,
        values: Tensor,
        estimates: Estimates,
        minibatch: int = 64,
        epochs: int = 1,
        clip: float = 0.5,
        number: int | None = None,
    ) -> dict[str, float]:
        """Train the value model to predict the returns.

        Args:
            rollout: The answers.
            values: `[B, R]`, the result of `values`.
            estimates: The result of `advantages`.
            minibatch: Rows of a minibatch over all ranks.
            epochs: How often each row is used.
            clip: The clip range of values: how far a value may move with a gain in the objective.
            number: The step's number: after a failure, a second call with the same number resumes at the failed
                minibatch.

        Returns:
            Means over the minibatches, as sums of the ranks' parts: `value_loss`, `value_grad_norm`; and
            `value_skipped`, the number of skipped updates, if any.
        """
        call = self.learner.start_call("update", number)
        counts = gather_numbers(self.ctx, len(values))
        for rows in split_minibatches(counts, self.ctx.rank, minibatch, epochs)[call.done :]:
            mask = rollout["mask"][rows]
            now = response_values(self.model, rollout["tokens"][rows], rollout["attention"][rows], mask.shape[1])
            losses = maths.value_loss(now, values[rows], estimates["returns"][rows], clip)
            loss = maths.token_mean(losses, mask, make_total(self.ctx)(mask.sum()))
            self.learner.update_weights(loss, self.lr, value_loss=loss)
        return call.means("value", self.ctx.world_size)

    def save(self, directory: str) -> None:
        """Write a checkpoint of model and optimizer into a folder."""
        checkpoint.save(self.ctx, directory, self.model, self.learner)

    def restore(self, directory: str) -> None:
        """Restore model and optimizer from a checkpoint of any number of ranks."""
        self._adopt(ValueModel(checkpoint.read_config(self.ctx, directory)))
        checkpoint.restore(self.ctx, directory, self.model, self.learner)

    def _adopt(self, model: ValueModel) -> None:
        spread = SpreadModel(self.ctx, model.to(self.ctx.device), self.layout)
        self.loaded = Learner(self.ctx, spread, self.max_grad_norm, self.skip_nonfinite)
