"""The role `ppo.reference`: a frozen copy of the policy, which limits the actor's drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from colocate import Concat, Reduce, Role, Scatter, method, needs
from colocate_ppo import checkpoint, maths, parallel
from colocate_ppo.actor import collect_actor_weights
from colocate_ppo.forward import response_log_probs
from colocate_ppo.model import Weights, make_config, make_empty_model
from colocate_ppo.rollout import Rollout
from colocate_ppo.spread import Dtype, Layout, SpreadModel, check_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@needs("process_group")
class Reference(Role):
    """A frozen copy of the actor's model. `load` sets the weights.

    Args:
        parallel: How the ranks share the model: "none" or "fsdp2"; see `Layout`.
        dtype: The dtype of computations. Weights are float32.
    """

    def __init__(self, parallel: Literal["none", "fsdp2"] = "none", dtype: Dtype = "float32") -> None:
        self.layout = Layout(parallel, dtype)
        self.loaded: SpreadModel | None = None

    @property
    def model(self) -> SpreadModel:
        """The loaded reference model."""
        return check_loaded(self.ctx, self.loaded)

    def renew(self) -> None:
        """Use new process groups after a failed call."""
        from colocate.torch import renew  # Imported only when needed, because the import is slow.

        if self.loaded is not None:
            renew(self.loaded.wrapped, None, self.ctx)

    def plan(self, roles: Mapping[str, object]) -> None:
        """Load the actor's weights as in `ppo.train`; called by `colocate plan`."""
        self.load(collect_actor_weights(roles))

    @method
    def load(self, weights: Weights) -> None:
        """Replace the model by a copy of these weights."""
        self._adopt(make_config(weights["config"]))
        self.model.load_weights(weights["state"])

    @method(dispatch=Scatter("rollout"), collect=Concat())
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each response token, `[B, R]`."""
        return response_log_probs(self.model, rollout, temperature)

    @method(dispatch=Scatter("rollout", "log_probs", "reference_log_probs"), collect=Reduce("sum"), awake=())
    def kl(
        self, rollout: Rollout, log_probs: Tensor, reference_log_probs: Tensor, estimator: maths.KlEstimator = "k1"
    ) -> float:
        """Return the mean KL between actor and reference over all response tokens, as the sum of the ranks' parts."""
        estimate, mask = maths.kl_estimate(log_probs, reference_log_probs, estimator), rollout["mask"]
        return maths.token_mean(estimate, mask, parallel.make_total(self.ctx)(mask.sum())).item()

    def save(self, directory: str) -> None:
        """Write a checkpoint of the model into a folder."""
        checkpoint.save(self.ctx, directory, self.model)

    def restore(self, directory: str) -> None:
        """Restore the model from a checkpoint of any number of ranks."""
        self._adopt(checkpoint.read_config(self.ctx, directory))
        checkpoint.restore(self.ctx, directory, self.model)

    def _adopt(self, config: PreTrainedConfig) -> None:
        model = make_empty_model(config, self.ctx.device).requires_grad_(False)
        self.loaded = SpreadModel(self.ctx, model, self.layout)
