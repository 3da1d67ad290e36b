"""The mathematics of PPO, against torchrl, published formulas and sums done by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Categorical
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate

from colocate_ppo import maths


def answers(rows: int = 16, width: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Generator]:
    """Return a mask of answers with 1 to `width` tokens, and a generator for more random numbers."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return torch.arange(width) < lengths, generator


@pytest.mark.parametrize(("estimate", "tolerance"), [("plain", 0.0), ("vectorised", 1e-5)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.1)])
def test_gae_is_that_of_torchrl(estimate: str, tolerance: float, gamma: float, lam: float) -> None:
    mask, generator = answers()
    rewards, values = torch.randn(2, *mask.shape, generator=generator)
    advantages, returns = maths.gae(rewards, values, mask, gamma, lam)

    last = (torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1)[..., None]
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    theirs = generalized_advantage_estimate if estimate == "plain" else vec_generalized_advantage_estimate
    expected, expected_returns = theirs(
        gamma, lam, values[..., None], following[..., None], rewards[..., None], done=last, terminated=last
    )
    torch.testing.assert_close(advantages[mask], expected.squeeze(-1)[mask], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(returns[mask], expected_returns.squeeze(-1)[mask], rtol=tolerance, atol=tolerance)
    assert advantages[~mask].eq(0).all()
    assert returns[~mask].eq(0).all()


def test_whitened_tokens_have_mean_0_and_variance_1() -> None:
    """Whitened tokens have mean 0 and variance 1, also if the mean of the values is far from 0."""
    mask, generator = answers()
    values = torch.randn(mask.shape, generator=generator) * 3
    white = maths.whiten(values + 5, mask)
    assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[mask].var().item() == pytest.approx(1.0, abs=1e-5)
    assert white[~mask].eq(0).all()
    torch.testing.assert_close(maths.whiten(values + 1000, mask), white, rtol=1e-3, atol=1e-3)


def test_token_mean_weighs_tokens_not_rows() -> None:
    """Every token weighs the same, and the means of parts add up to the mean of the whole."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 9.0, 9.0]])
    assert maths.token_mean(values, mask, mask.sum()).item() == 2.0
    assert [maths.token_mean(values[[row]], mask[[row]], mask.sum()).item() for row in (0, 1)] == [0.75, 1.25]


def test_kl_estimators_are_the_published_ones() -> None:
    """The estimators are Schulman's: k1 = -log r, k2 = (log r)² / 2, k3 = (r - 1) - log r, with r = p_reference / p."""
    p, reference = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.25, 0.8]])
    ratio = reference / p
    logs = p.log(), reference.log()
    torch.testing.assert_close(maths.kl_estimate(*logs, "k1"), -ratio.log())
    torch.testing.assert_close(maths.kl_estimate(*logs, "k2"), ratio.log() ** 2 / 2)
    torch.testing.assert_close(maths.kl_estimate(*logs, "k3"), (ratio - 1) - ratio.log())


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2 and k3"):
        maths.kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]


def test_the_score_is_paid_on_the_last_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = maths.token_rewards(torch.tensor([1.0, 0.5]), torch.full((2, 3), 2.0), mask, kl_coefficient=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 0.8, 0.0], [-0.2, -0.2, 0.3]]))


def test_log_probs_and_entropy_match_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator)
    tokens = torch.randint(7, (3, 4), generator=generator)
    theirs: Any = Categorical(logits=logits)
    torch.testing.assert_close(maths.token_log_probs(logits, tokens), theirs.log_prob(tokens))
    torch.testing.assert_close(maths.entropy(logits), theirs.entropy())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # A larger ratio gains nothing more.
        (0.5, 2.0, -1.0, False),  # The way back isn't clipped.
        (0.5, -2.0, 1.6, True),  # A smaller ratio gains nothing more.
        (1.5, -2.0, 3.0, False),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    found, was_clipped = maths.policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), clip=0.2
    )
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert was_clipped.item() is clipped


@pytest.mark.parametrize(
    ("value", "old", "goal", "loss"),
    [
        (1.0, 0.8, 2.0, 0.5),  # The plain error is halved.
        (3.0, 1.0, 3.0, 1.125),  # Beyond the clip the value counts as 1.5.
        (0.0, 1.0, 3.0, 4.5),  # The larger of two losses counts.
    ],
)
def test_value_loss_by_hand(value: float, old: float, goal: float, loss: float) -> None:
    found = maths.value_loss(torch.tensor([[value]]), torch.tensor([[old]]), torch.tensor([[goal]]), clip=0.5)
    assert found.item() == pytest.approx(loss)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_no_penalty_of_an_infinite_kl(estimator: maths.KlEstimator) -> None:
    """With a KL coefficient of 0 the rewards are the scores, even if the KL is infinite."""
    mask = torch.tensor([[True, True, False]])
    kl = maths.kl_estimate(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-math.inf, -2.0, 0.0]]), estimator)
    assert maths.token_rewards(torch.tensor([1.0]), kl, mask, kl_coefficient=0.0).tolist() == [[0.0, 1.0, 0.0]]
    assert maths.token_rewards(torch.tensor([1.0]), kl, mask, kl_coefficient=0.1)[0, 0] == -math.inf
