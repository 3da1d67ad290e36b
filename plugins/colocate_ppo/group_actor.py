"""The role `grpo.actor`: the policy of `ppo.actor`, trained by comparing several answers to the same question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from colocate import Concat, ConfigError, OnRank, Reduce, Scatter, method
from colocate_ppo import maths
from colocate_ppo.actor import Actor, describe_question
from colocate_ppo.forward import INFERENCE, response_logits
from colocate_ppo.parallel import count_minibatches, gather_numbers, make_total, split_evenly
from colocate_ppo.rollout import Rollout, make_rollout, widen_prompts
from colocate_ppo.task import Problems
from colocate_ppo.tokenizer import PaddedRows


class Response(Protocol):
    """An engine's response: the token ids, with the end token, and their log-probabilities."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of the response's tokens."""
        ...

    @property
    def log_probs(self) -> Sequence[float]:
        """The log-probability of each token in the response."""
        ...


class GroupActor(Actor):
    """The actor of `ppo.actor` with additional methods for GRPO."""

    @method(dispatch=Scatter("problems"), collect=Concat(), awake=INFERENCE)
    def sample(
        self,
        problems: Problems,
        samples: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        number: int | None = None,
    ) -> Rollout:
        """Generate `samples` answers to each problem.

        The rollout has a row for each answer; a problem's answers are adjacent.
        """
        return self.generate(self._with_prompts(problems).repeat(samples), max_new_tokens, temperature, number=number)

    @method(dispatch=Scatter("problems"), collect=Concat(), awake=())
    def prompts(self, problems: Problems) -> list[list[int]]:
        """Return the token ids of each question's prompt, for an engine."""
        return [[*prompt] for prompt in self._with_prompts(problems).prompts]

    @method(dispatch=Scatter("problems", "responses"), collect=Concat(), awake=())
    def read(self, problems: Problems, responses: Sequence[Sequence[Response]], max_new_tokens: int) -> Rollout:
        """Convert an engine's samples to a rollout.

        Args:
            problems: The problems; with their `prompts`, if the engine was given these.
            responses: The samples of each problem, equally many for all.
            max_new_tokens: R, the longest response.

        Returns:
            A row for each sample; a problem's samples are adjacent.

        Raises:
            ConfigError: The engine had no room for an answer.
        """
        prepared = self._with_prompts(problems).repeat(len(responses[0]))
        flat = [response for group in responses for response in group]
        if (full := next((row for row, response in enumerate(flat) if not response.token_ids), None)) is not None:
            raise ConfigError(
                f"{describe_question(prepared, full)} fills all the room that the engine has: raise max_length "
                f"of its role "
                "(max_model_len of vLLM), up to what the model takes, or give shorter questions"
            )
        prompts = self.tokenizer.pad_rows(prepared.prompts, self.ctx.device, side="left")
        prompts = widen_prompts(prompts, max(gather_numbers(self.ctx, prompts.tokens.shape[1])), self.tokenizer.pad)
        tokens = torch.full((len(flat), max_new_tokens), self.tokenizer.pad)
        sampled = torch.zeros(tokens.shape)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, response in enumerate(flat):
            columns = slice(len(response.token_ids))
            tokens[row, columns], sampled[row, columns] = (
                torch.tensor(response.token_ids),
                torch.tensor(response.log_probs),
            )
            mask[row, columns] = True
        device = self.ctx.device
        read = PaddedRows(tokens.to(device), mask.to(device))
        rollout = make_rollout(prompts, read, prepared, self.tokenizer.decode_responses(read))
        rollout["sampled"] = sampled.to(device)
        return rollout

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=())
    def lengths(self, rollout: Rollout) -> list[int]:
        """Return the number of tokens of each response."""
        lengths: list[int] = rollout["mask"].sum(dim=1).tolist()
        return lengths

    @method(dispatch=OnRank(0), awake=())
    def advantages(self, scores: Tensor, samples: int, baseline: maths.Baseline = "leave_one_out") -> Tensor:
        """Compute the advantage of each response over the other responses to the same question, `[B]`.

        Args:
            scores: `[B]`, the scores of the whole batch.
            samples: Responses to each question.
            baseline: The baseline of a score; see `maths.group_advantages`.
        """
        return maths.group_advantages(scores, samples, baseline)

    @method(
        dispatch=Scatter("rollout", "log_probs", "advantages", "reference_log_probs", balance="tokens"),
        collect=Reduce("sum"),
    )
    def learn(
        self,
        rollout: Rollout,
        log_probs: Tensor,
        advantages: Tensor,
        tokens: Sequence[int] | None = None,
        reference_log_probs: Tensor | None = None,
        minibatch: int = 64,
        epochs: int = 1,
        clip: float = 0.2,
        kl_coefficient: float = 0.0,
        kl_estimator: maths.KlEstimator = "k3",
        importance_cap: float = 2.0,
        temperature: float = 1.0,
        lr_scale: float = 1.0,
        number: int | None = None,
    ) -> dict[str, float]:
        """Update the policy with PPO's clipped objective, averaged over the tokens of a minibatch.

        Args:
            rollout: The responses.
            log_probs: `[B, R]`, the result of `log_probs` before the update.
            advantages: `[B]`, the result of `advantages`.
            tokens: Tokens of each response, to give ranks equal work; None keeps responses in place.
            reference_log_probs: `[B, R]`, under the reference; None without one.
            minibatch: Responses in a minibatch over all ranks, on average.
            epochs: How often each response is used.
            clip: PPO's clip range: how far the probability ratio may move from 1 with a gain in the objective.
            kl_coefficient: The weight of the KL to the reference in the loss.
            kl_estimator: The estimator of that KL.
            importance_cap: The largest of `maths.importance_weights`, for responses of an engine.
            temperature: The temperature of the sampling.
            lr_scale: Multiplies the learning rate.
            number: The step's number: after a failure, a second call with the same number resumes at the failed
                minibatch.

        Returns:
            Means over the minibatches, as sums of the ranks' parts: `policy_loss`, `entropy`, `clip_fraction`,
            `informative` (the fraction of tokens with a non-zero advantage), `policy_grad_norm`, and `policy_skipped`
            (the number of skipped updates, if any); with an engine also `engine_gap` (the mean difference of
            log-probabilities between engine and trainer), `engine_weight` (the mean weight) and `engine_truncated` (the
            fraction of tokens with a truncated weight).
        """
        call = self.learner.start_call("learn", number)
        lengths = rollout["mask"].sum(dim=1).cpu()
        k = count_minibatches(gather_numbers(self.ctx, len(lengths)), minibatch)
        for rows in split_evenly(lengths, k, epochs)[call.done :]:
            mask, old = rollout["mask"][rows], log_probs[rows]
            ids = rollout["tokens"][rows]
            logits = response_logits(self.model, ids, rollout["attention"][rows], mask.shape[1], temperature)
            # Mask padding before `exp`, because an infinite ratio on padding would make the gradient NaN.
            now = torch.where(mask, maths.token_log_probs(logits, ids[:, -mask.shape[1] :]), old)
            losses, clipped = maths.policy_loss(now, old, advantages[rows, None], clip)
            informative = (advantages[rows, None] != 0).float().expand_as(old)
            sums = {
                "entropy": maths.entropy(logits),
                "clip_fraction": clipped.float(),
                "informative": informative,
            }
            if "sampled" in rollout:
                sampled = rollout["sampled"][rows]
                weights = maths.importance_weights(old, sampled, importance_cap)
                losses = losses * weights
                sums |= {
                    "engine_gap": (old - sampled).abs(),
                    "engine_weight": weights,
                    "engine_truncated": (weights == importance_cap).float(),
                }
            if reference_log_probs is not None and kl_coefficient:
                losses = losses + kl_coefficient * maths.kl_estimate(now, reference_log_probs[rows], kl_estimator)
            count = make_total(self.ctx)(mask.sum())
            loss = maths.token_mean(losses, mask, count)
            parts = {name: maths.token_mean(values, mask, count) for name, values in sums.items()}
            self.learner.update_weights(loss, self.lr * lr_scale, policy_loss=loss, **parts)
        return call.means("policy", self.ctx.world_size)
