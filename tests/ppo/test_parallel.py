"""Data parallelism: the split of a batch over ranks doesn't change the update."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

import colocate
from colocate_ppo import parallel
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.model import Weights
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.spread import Layout, SpreadModel
from colocate_ppo.task import Problems
from colocate_ppo.team import Team

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "feed_forward": 64}
sizes = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any)


def rows_of(counts: list[int], size: int, epochs: int) -> list[list[int]]:
    """Return the row numbers of each minibatch in the whole batch."""
    shares = [parallel.split_minibatches(counts, rank, size, epochs) for rank in range(len(counts))]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    together = zip(*shares, strict=True)
    return [[start + int(row) for start, rows in zip(starts, parts, strict=True) for row in rows] for parts in together]


@settings(deadline=None)
@given(sizes, st.integers(1, 30), st.integers(1, 4))
def test_minibatches_do_not_depend_on_the_ranks(counts: list[int], size: int, epochs: int) -> None:
    assert rows_of(counts, size, epochs) == rows_of([sum(counts)], size, epochs)


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 30), st.integers(1, 4))
def test_every_epoch_uses_every_row_once(count: int, size: int, epochs: int) -> None:
    batches = rows_of([count], size, epochs)
    k = -(-count // size)
    assert len(batches) == k * epochs
    for epoch in range(epochs):
        assert sorted(row for batch in batches[epoch * k : (epoch + 1) * k] for row in batch) == list(range(count))


def test_other_rows_meet_in_the_next_epoch() -> None:
    first, *others = rows_of([64], 16, 2)
    assert all(len(set(first) & set(batch)) <= 4 for batch in others)


@attrs.frozen(eq=False)
class Learned:
    """The results of one step of all roles."""

    losses: dict[str, float]
    actor: Weights
    log_probs: torch.Tensor
    values: torch.Tensor


def learn(team: Team, problems: Problems, weights: Weights, minibatch: int) -> Learned:
    """Run a greedy rollout and one update from given weights; nothing in it is random."""
    team.actor.load(weights)
    warm_up = team.actor.warm_up(problems)
    for role in (team.actor, team.critic, team.reference):
        role.load(weights)
    with team.scope():
        rollout = team.actor.generate.keep(problems, max_new_tokens=6, greedy=True)
        scores = team.reward.score.keep(rollout.ref)
        summary = team.reward.summary(rollout.ref, scores.ref)
        log_probs = team.actor.log_probs.keep(rollout.ref)
        reference = team.reference.log_probs.keep(rollout.ref)
        values = team.critic.values.keep(rollout.ref)
        estimates = team.critic.advantages.keep(rollout.ref, scores.ref, values.ref, log_probs.ref, reference.ref)
        kl = team.reference.kl(rollout.ref, log_probs.ref, reference.ref)
        losses = team.critic.update(rollout.ref, values.ref, estimates.ref, minibatch=minibatch, epochs=2)
        losses |= team.actor.update(rollout.ref, log_probs.ref, estimates.ref, minibatch=minibatch, epochs=2)
        after = team.actor.log_probs(rollout.ref), team.critic.values(rollout.ref)
    return Learned({**losses, **summary, "warm_up": warm_up, "kl": kl}, team.actor.weights(), *after)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Team]:
    """Spawn the four roles in two processes, whose actors begin with random weights of their own."""
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        roles: dict[str, colocate.RoleSpec[Any]] = {
            "actor": colocate.role(Actor, **SMALL),
            "critic": colocate.role(Critic),
            "reference": colocate.role(Reference),
            "reward": colocate.role(Reward),
        }
        yield Team.from_group(pool.spawn(roles, name="policy"))


@pytest.mark.in_make_test("11-4")
@pytest.mark.parametrize(
    ("rows", "minibatch"),
    [(12, 4), (11, 4), (3, 1)],  # Equal parts; unequal parts; a rank without rows in some minibatches.
)
def test_two_ranks_learn_like_one_rank(two_ranks: Team, problems: Problems, rows: int, minibatch: int) -> None:
    alone = Team(Actor(**SMALL), Critic(), Reference(), Reward(), two_ranks.scope)
    weights = alone.actor.weights()
    expected = learn(alone, problems[:rows], weights, minibatch)
    found = learn(two_ranks, problems[:rows], weights, minibatch)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.actor["state"], expected.actor["state"], rtol=1e-3, atol=1e-5)


def test_aligned_ranks_are_equal_and_stay_so(two_ranks: Team, problems: Problems) -> None:
    two_ranks.align_models()
    two_ranks.actor.warm_up(problems)
    one, other = (two_ranks.actor.weights.options(ranks=[rank])()["state"] for rank in (0, 1))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_mesh_with_other_axes_is_refused() -> None:
    ctx: Any = SimpleNamespace(role="actor", world_size=2, mesh=colocate.Mesh({"dp": 1, "tp": 2}))
    with pytest.raises(colocate.ConfigError, match="which is the mesh that it has without `mesh`"):
        SpreadModel(ctx, torch.nn.Linear(1, 1), Layout())


def test_shuffled_scores_go_to_all_ranks(two_ranks: Team, problems: Problems) -> None:
    """Shuffled scores of 11 rows on two ranks have the values and the summary of the ordered scores."""
    with two_ranks.scope():
        rollout = two_ranks.actor.generate.keep(problems[:11], max_new_tokens=6)
        scores = two_ranks.reward.score.keep(rollout.ref)
        shuffled = two_ranks.reward.shuffle.keep(scores.ref)
        assert shuffled.fetch().sort().values.equal(scores.fetch().sort().values)
        ordered, unordered = (two_ranks.reward.summary(rollout.ref, each.ref) for each in (scores, shuffled))
    assert unordered == pytest.approx(ordered)


def test_ddp_gradients_lie_in_one_bucket() -> None:
    """All gradients under DDP lie in one bucket, without memory of their own."""
    with colocate.connect() as runtime, runtime.reserve() as pool:
        group = pool.spawn({"actor": colocate.role(Actor, **SMALL, parallel="ddp")})
        ((gradients, pieces),) = group.run(_gradients)
    assert pieces == 1 < gradients


def _gradients(ctx: colocate.Context) -> tuple[int, int]:
    """Return how many gradients a backward pass leaves, and in how many buffers."""
    model = ctx.sibling("actor", Actor).model
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    found = [each.grad for each in model.module.parameters() if each.grad is not None]
    return len(found), len({each.untyped_storage().data_ptr() for each in found})
