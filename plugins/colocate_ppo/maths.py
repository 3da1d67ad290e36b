"""The mathematics of PPO at token level, as plain functions over tensors, without models or roles.

Shapes: B rows (answers), T response positions. Values per token have the shape `[B, T]`. `mask` is boolean, true on an
answer's own tokens (end token included), which come first in the row. Floats are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
Baseline = Literal["leave_one_out", "normalised"]
Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks; the identity for a single rank."""


def sum_alone(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, as the sum over a single rank."""
    return tensor


def token_mean(values: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Compute this rank's part of the mean over the tokens of all ranks: `sum(values * mask) / tokens`.

    The ranks' parts add up to the mean, and the parts' gradients to the mean's gradient. Each token has equal weight.

    Args:
        values: `[B, T]`.
        mask: `[B, T]`, boolean.
        tokens: A scalar, the number of tokens on all ranks.

    Returns:
        A scalar; 0 without any token.
    """
    return torch.where(mask, values, 0.0).sum() / tokens.clamp(min=1)


def whiten(values: Tensor, mask: Tensor, total: Total = sum_alone) -> Tensor:
    """Shift and scale values to mean 0 and variance 1 over the tokens of all ranks.

    `(x - mean) / sqrt(variance + 1e-8)` with the unbiased variance, as in Ziegler et al. 2019 (arXiv:1909.08593).

    Args:
        values: `[B, T]`.
        mask: `[B, T]`, boolean.
        total: Sums over the ranks.

    Returns:
        `[B, T]`, 0 where the mask is false.
    """
    tokens = total(mask.sum())
    centred = values - total(token_mean(values, mask, tokens))
    # Compute the variance in a second pass, because the difference of two large sums would lose float32's precision.
    variance = total(token_mean(centred.square(), mask, tokens - 1))
    return torch.where(mask, centred * torch.rsqrt(variance + 1e-8), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (Schulman et al. 2015, arXiv:1506.02438, equation 16).

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lam * A_{t+1}`; after the end, V and A are 0.

    Args:
        rewards: `[B, T]`, the reward of each token.
        values: `[B, T]`, the critic's value of the state in which each token was chosen.
        mask: `[B, T]`, boolean.
        gamma: Discount.
        lam: Between one-step differences (0) and whole returns (1).

    Returns:
        Advantages and returns (`advantages + values`), `[B, T]` each, 0 where the mask is false.
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        next_value = values[:, t]
        columns.append(advantage)
    advantages = torch.where(mask, torch.stack(columns[::-1], dim=1), 0.0)
    return advantages, advantages + values


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy, reference) from sampled tokens (Schulman 2020, joschu.net/blog/kl-approx.html).

    With `log r = reference - log_probs`: `k1 = -log r`, `k2 = (log r)^2 / 2`, `k3 = (r - 1) - log r`. k1 and k3 are
    unbiased, k2 and k3 are never negative.

    Args:
        log_probs: `[B, T]`, of the sampled tokens under the policy that sampled them.
        reference: `[B, T]`, of the same tokens under the reference.
        estimator: The estimator's name.

    Returns:
        `[B, T]`.
    """
    log_ratio = reference - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}: there are k1, k2 and k3")


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coefficient: float) -> Tensor:
    """Compute the reward of each token: a KL penalty, plus the answer's score on the last token.

    As in Ziegler et al. 2019 (arXiv:1909.08593, equation 2), at token level.

    Args:
        scores: `[B]`, the score of each answer.
        kl: `[B, T]`, an estimate for each token.
        mask: `[B, T]`, boolean; every row has at least one token.
        kl_coefficient: The weight of the penalty.

    Returns:
        `[B, T]`, 0 where the mask is false.
    """
    # Skip the penalty if the coefficient is 0, because 0 times an infinite estimate is NaN.
    rewards = torch.where(mask, -kl_coefficient * kl, 0.0) if kl_coefficient else torch.zeros_like(kl)
    last = mask.sum(dim=1, keepdim=True) - 1
    return rewards.scatter_add(1, last, scores.to(rewards.dtype)[:, None])


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute log-probabilities of given tokens: `logits[token] - logsumexp(logits)`.

    Args:
        logits: `[B, T, V]`.
        tokens: `[B, T]`, int64.

    Returns:
        `[B, T]`.
    """
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Compute the entropy of each token's distribution in nats: `logsumexp(logits) - sum(p * logits)`.

    Args:
        logits: `[B, T, V]`.

    Returns:
        `[B, T]`.
    """
    return logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped objective as a loss for each token (Schulman et al. 2017, arXiv:1707.06347, equation 7).

    `max(-A * ratio, -A * clamp(ratio, 1 - clip, 1 + clip))` with `ratio = exp(log_probs - old_log_probs)`.

    Args:
        log_probs: `[B, T]`, under the policy in training.
        old_log_probs: `[B, T]`, under the policy that sampled.
        advantages: `[B, T]`.
        clip: How far the ratio may move from 1 with a gain in the objective.

    Returns:
        The loss of each token `[B, T]`, and where the clipped side was the larger one, `[B, T]` boolean.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(free, clipped), clipped > free


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Compute half the clipped squared error of the critic (OpenAI baselines' ppo2; Ziegler et al. 2019).

    `max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`.

    Args:
        values: `[B, T]`, of the critic in training.
        old_values: `[B, T]`, of the critic at the time of the advantages.
        returns: `[B, T]`.
        clip: How far a value may move from the old one with a gain in the objective.

    Returns:
        The loss of each token, `[B, T]`.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


def group_advantages(scores: Tensor, samples: int, baseline: Baseline) -> Tensor:
    """Compute the advantage of each answer over the other answers to the same question.

    "leave_one_out": the score minus the other scores' mean (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).
    "normalised": `(score - mean) / (deviation + 1e-4)` of the group, with the unbiased deviation (Shao et al. 2024,
    arXiv:2402.03300).

    Args:
        scores: `[B]`; the answers to a question are adjacent.
        samples: Answers to each question, at least two.
        baseline: The baseline's name.

    Returns:
        `[B]`; 0 for a question whose answers all have the same score.
    """
    groups = scores.view(-1, samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        return (centred * (samples / (samples - 1))).flatten()
    if baseline == "normalised":
        return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
    raise ValueError(f"unknown baseline {baseline!r}: there are leave_one_out and normalised")


def importance_weights(log_probs: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Compute truncated importance weights of tokens: the trainer's probability over the engine's (Ionides 2008).

    `min(exp(log_probs - sampled), cap)` weighs an engine's samples as if the trainer had sampled them, although the
    numerics of both, or the ages of their weights, may differ.

    Args:
        log_probs: `[B, T]`, under the trainer before the update.
        sampled: `[B, T]`, as sampled.
        cap: The largest weight.

    Returns:
        `[B, T]`.
    """
    return torch.exp(log_probs - sampled).clamp(max=cap)
