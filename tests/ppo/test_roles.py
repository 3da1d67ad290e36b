"""PPO roles outside any worker: their results, and the effects of an update."""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from colocate_ppo import maths
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.model import load_pretrained_model
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.rollout import Estimates, Rollout
from colocate_ppo.task import Problems
from colocate_ppo.tokenizer import load_tokenizer, make_character_tokenizer


@attrs.frozen(eq=False)
class Case:
    """A batch, and the results of the four roles for it."""

    actor: Actor
    critic: Critic
    reference: Reference
    rollout: Rollout
    scores: Tensor
    log_probs: Tensor
    values: Tensor
    estimates: Estimates


@pytest.fixture
def case(actor: Actor, problems: Problems) -> Case:
    critic, reference, reward = Critic(lr=1e-2), Reference(), Reward()
    weights = actor.weights()
    critic.load(weights)
    reference.load(weights)
    head: Any = critic.model.module
    torch.nn.init.normal_(head.head.weight, generator=torch.Generator().manual_seed(0))
    rollout = actor.generate(problems, max_new_tokens=6)
    scores, log_probs, values = reward.score(rollout), actor.log_probs(rollout), critic.values(rollout)
    estimates = critic.advantages(rollout, scores, values, log_probs, reference.log_probs(rollout))
    return Case(actor, critic, reference, rollout, scores, log_probs, values, estimates)


def parameters(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_log_probs_are_independent_of_batch(case: Case) -> None:
    """An answer's log-probabilities depend neither on padding nor on other rows."""
    rollout, model = case.rollout, case.actor.model
    width = rollout["mask"].shape[1]
    for row in range(len(rollout["problems"])):
        tokens = rollout["tokens"][row][rollout["attention"][row]]
        length = int(rollout["mask"][row].sum())
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, -length - 1 : -1]
        alone: Any = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close(case.log_probs[row, :length], alone.log_prob(tokens[-length:]), rtol=1e-4, atol=1e-4)
    assert case.log_probs.shape == (12, width)


def test_reference_keeps_initial_actor(case: Case) -> None:
    before = case.reference.log_probs(case.rollout)
    torch.testing.assert_close(before, case.log_probs)
    assert case.reference.kl(case.rollout, case.log_probs, before) == pytest.approx(0.0, abs=1e-6)
    case.actor.update(case.rollout, case.log_probs, case.estimates, minibatch=4)
    assert case.reference.log_probs(case.rollout).equal(before)
    after = case.actor.log_probs(case.rollout)
    assert case.reference.kl(case.rollout, after, before, "k3") > 0


def test_a_fresh_critic_values_everything_at_0(actor: Actor, problems: Problems) -> None:
    critic = Critic()
    critic.load(actor.weights())
    assert critic.values(actor.generate(problems, max_new_tokens=4)).eq(0).all()


def test_values_are_of_the_state_before_each_token(case: Case) -> None:
    """Another token at one place changes the values of later places only."""
    other: Rollout = {**case.rollout, "tokens": case.rollout["tokens"].clone()}
    place = other["tokens"].shape[1] - 3
    other["tokens"][:, place] = (other["tokens"][:, place] + 1) % case.actor.tokenizer.size
    changed = (case.critic.values(other) - case.values).abs() > 1e-6
    width = other["mask"].shape[1]
    assert not changed[:, : width - 2].any()
    whole = case.rollout["mask"].all(dim=1)
    assert whole.any()
    assert changed[whole, width - 2 :].all()


def test_an_update_of_the_actor_makes_good_answers_likelier(case: Case) -> None:
    critic_before, before = parameters(case.critic.model.module), parameters(case.actor.model.module)
    metrics = case.actor.update(case.rollout, case.log_probs, case.estimates, minibatch=12, epochs=3)
    assert parameters(case.critic.model.module).equal(critic_before)
    assert not parameters(case.actor.model.module).equal(before)
    mask = case.rollout["mask"]
    change = case.actor.log_probs(case.rollout) - case.log_probs
    assert (change * case.estimates["advantages"])[mask].mean().item() > 0
    assert metrics.keys() == {"policy_loss", "entropy", "clip_fraction", "policy_grad_norm"}
    assert metrics["entropy"] > 0


def test_actor_is_unchanged_before_first_step(case: Case) -> None:
    """Before the first step the ratio is 1 and the loss 0, and an update with learning rate 0 changes no weight."""
    before = parameters(case.actor.model.module)
    metrics = case.actor.update(case.rollout, case.log_probs, case.estimates, minibatch=12, lr_scale=0.0)
    assert metrics["policy_loss"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert parameters(case.actor.model.module).equal(before)


def test_padding_has_no_gradient(case: Case) -> None:
    """Log-probabilities on padding don't change an update, however large or small."""
    mask = case.rollout["mask"]
    mask[:, 4:] = False
    low, high = (torch.where(mask, case.log_probs, far) for far in (-1000.0, 1000.0))
    plain, padded = (
        case.actor.update(case.rollout, old, case.estimates, minibatch=12, lr_scale=0.0)
        for old in (case.log_probs, low)
    )
    assert padded == plain
    actor = GroupActor(layers=2, hidden=32, heads=2, feed_forward=64)
    actor.load(case.actor.weights())
    advantages = actor.advantages(torch.arange(12.0), 2)
    plain, padded = (
        actor.learn(case.rollout, *given, minibatch=12, kl_coefficient=0.1, lr_scale=0.0)
        for given in (
            (case.log_probs, advantages, None, case.log_probs),
            (low, advantages, None, high),
        )
    )
    assert padded == plain
    unlikely = torch.full_like(low, -torch.inf)
    assert actor.learn(case.rollout, low, advantages, None, unlikely, minibatch=12)["policy_grad_norm"] > 0


def test_an_entropy_bonus_raises_entropy(case: Case) -> None:
    nothing: Estimates = {name: torch.zeros_like(case.values) for name in ("advantages", "returns")}  # type: ignore[assignment]
    first = case.actor.update(case.rollout, case.log_probs, nothing, minibatch=12, entropy_coefficient=1.0)
    second = case.actor.update(case.rollout, case.log_probs, nothing, minibatch=12, entropy_coefficient=1.0)
    assert second["entropy"] > first["entropy"]


def passes_of_layers(model: torch.nn.Module, update: Callable[[], object]) -> list[int]:
    """Return how often an update computes each layer, counted in its attention: a recomputed layer isn't called."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # Late import: each worker collects all tests.

    counts: collections.Counter[int] = collections.Counter()
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    handles = [
        attention.register_forward_pre_hook(lambda *_, number=number: counts.update([number]))
        for number, layer in enumerate(layers)
        for name, attention in layer.named_children()
        if name == "self_attn"
    ]
    update()
    for handle in handles:
        handle.remove()
    return [counts[number] for number in range(len(layers))]


@pytest.mark.parametrize("anew", [False, True])
def test_gradient_checkpointing_computes_each_layer_twice(case: Case, anew: bool) -> None:
    """Gradient checkpointing computes each layer twice per minibatch of an update, and once without gradients."""
    actor = Actor(layers=2, hidden=32, heads=2, feed_forward=64, gradient_checkpointing=anew)
    critic = Critic(gradient_checkpointing=anew)
    actor.load(case.actor.weights())
    critic.load(case.actor.weights())
    updates = {
        actor: lambda: actor.update(case.rollout, case.log_probs, case.estimates, minibatch=4),
        critic: lambda: critic.update(case.rollout, case.values, case.estimates, minibatch=4),
    }
    for role, update in updates.items():
        assert passes_of_layers(role.model.module, update) == [6 if anew else 3] * 2  # For twelve rows.
    assert passes_of_layers(actor.model.module, lambda: actor.log_probs(case.rollout)) == [1, 1]
    assert passes_of_layers(critic.model.module, lambda: critic.values(case.rollout)) == [1, 1]


def test_critic_update_approaches_returns(case: Case) -> None:
    actor_before = parameters(case.actor.model.module)
    mask, returns = case.rollout["mask"], case.estimates["returns"]
    before = (case.values - returns)[mask].square().mean()
    case.critic.update(case.rollout, case.values, case.estimates, minibatch=6, epochs=4, clip=100.0)
    after = (case.critic.values(case.rollout) - returns)[mask].square().mean()
    assert after < before / 2
    assert parameters(case.actor.model.module).equal(actor_before)


def test_updates_change_neither_arguments_nor_earlier_results(case: Case) -> None:
    """An update changes neither its arguments nor earlier results."""
    weights = case.actor.weights()
    tensors = {name: value for name, value in case.rollout.items() if isinstance(value, Tensor)}
    given = [tensors, case.log_probs, case.values, dict(case.estimates), weights["state"]]
    before = copy.deepcopy(given)
    case.critic.update(case.rollout, case.values, case.estimates, minibatch=4)
    case.actor.update(case.rollout, case.log_probs, case.estimates, minibatch=4)
    case.actor.warm_up(case.rollout["problems"])
    torch.testing.assert_close(given, before, rtol=0, atol=0)


def test_warm_up_learns_the_demonstrations(actor: Actor, problems: Problems) -> None:
    losses = [actor.warm_up(problems) for _ in range(60)]
    assert losses[-1] < losses[0] / 4


def test_scores_match_task(problems: Problems) -> None:
    problem = attrs.evolve(problems[0], answer="dcba", entry={**problems[0].entry, "answer": "dcba"})
    answers = ["dcba", "dcab", "", "abcd"]
    rollout: Rollout = {
        "tokens": torch.zeros(4, 6, dtype=torch.long),
        "attention": torch.ones(4, 6, dtype=torch.bool),
        "mask": torch.tensor([[True, True, True]] * 3 + [[True, False, False]]),
        "problems": Problems.from_list([problem] * 4),
        "answers": answers,
        "token_ids": [[] for _ in answers],
    }
    reward = Reward()
    scores = reward.score(rollout)
    assert scores.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert reward.summary(rollout, scores) == {"reward": 0.375, "accuracy": 0.25, "length": 2.5}


def test_restored_roles_make_same_step(case: Case, tmp_path: Path) -> None:
    """Restored roles make the same next step as the saved roles, to the last bit."""

    def step(actor: Actor, critic: Critic) -> tuple[Tensor, Tensor, Rollout]:
        critic.update(case.rollout, case.values, case.estimates, minibatch=4)
        actor.update(case.rollout, case.log_probs, case.estimates, minibatch=4)
        return (
            parameters(actor.model.module),
            parameters(critic.model.module),
            actor.generate(case.rollout["problems"], 6, number=7),
        )

    step(case.actor, case.critic)
    for saved in (case.actor, case.critic, case.reference):
        folder = tmp_path / type(saved).__name__
        folder.mkdir()
        saved.save(str(folder))
    expected = step(case.actor, case.critic)

    actor = Actor(layers=2, hidden=32, heads=2, feed_forward=64, lr=1e-3, warm_up_lr=1e-2)
    critic, reference = Critic(lr=1e-2), Reference()
    for restored in (actor, critic, reference):
        restored.restore(str(tmp_path / type(restored).__name__))
    found = step(actor, critic)
    assert found[0].equal(expected[0])
    assert found[1].equal(expected[1])
    assert found[2]["answers"] == expected[2]["answers"]
    assert reference.log_probs(case.rollout).equal(case.reference.log_probs(case.rollout))


@pytest.fixture
def no_progress_bars() -> Iterator[None]:
    """Disable progress bars, which would leave a thread and a semaphore."""
    from transformers.utils import logging  # Late import, as in the roles: each worker collects all tests.

    bars: Any = logging
    bars.disable_progress_bar()
    yield
    bars.enable_progress_bar()


@pytest.mark.usefixtures("no_progress_bars")
def test_a_model_from_a_folder(tmp_path: Path, problems: Problems) -> None:
    """A folder's model, with its own tokenizer, works in actor, critic and reference."""
    tokenizer = make_character_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=tokenizer.size, tie_word_embeddings=True, **sizes, **heads))
    model.save_pretrained(tmp_path)
    tokenizer.inner.save_pretrained(tmp_path)

    actor, critic, reference, reward = Actor(model=str(tmp_path)), Critic(), Reference(), Reward()
    weights = actor.weights()
    critic.load(weights)
    reference.load(weights)
    rollout = actor.generate(problems, max_new_tokens=4)
    log_probs, values = actor.log_probs(rollout), critic.values(rollout)
    torch.testing.assert_close(reference.log_probs(rollout), log_probs)
    estimates = critic.advantages(rollout, reward.score(rollout), values, log_probs, log_probs)
    before = parameters(actor.model.module)
    actor.update(rollout, log_probs, estimates)
    critic.update(rollout, values, estimates)
    assert not parameters(actor.model.module).equal(before)
    assert critic.values(rollout).ne(0).any()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_code_of_a_model_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: Actor, device: str
) -> None:
    """A model folder's code is refused without a question on the terminal, and never runs."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    reference = Reference()
    reference.load(actor.weights())
    folder = tmp_path / "reference"
    folder.mkdir()
    reference.save(str(folder))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Slow", None]}
    own = {"model_type": "of-its-own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "own.py").write_text(f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()")
    for load in (
        lambda: load_pretrained_model(str(folder), torch.device(device)),
        lambda: load_tokenizer(str(folder)),
        lambda: reference.restore(str(folder)),
    ):
        with pytest.raises(ValueError, match="contains custom code"):
            load()
    assert not (tmp_path / "ran").exists()


def test_the_kl_penalty_lowers_the_returns(case: Case) -> None:
    far = case.log_probs - 1.0
    near = case.critic.advantages(case.rollout, case.scores, case.values, case.log_probs, case.log_probs)
    penalised = case.critic.advantages(
        case.rollout, case.scores, case.values, case.log_probs, far, kl_coefficient=0.5, lam=1.0
    )
    mask = case.rollout["mask"]
    undiscounted = maths.gae(torch.full_like(far, 0.5), torch.zeros_like(far), mask, 1.0, 1.0)[1]
    plain = case.critic.advantages(case.rollout, case.scores, case.values, case.log_probs, case.log_probs, lam=1.0)
    torch.testing.assert_close((plain["returns"] - penalised["returns"])[mask], undiscounted[mask])
    assert near["advantages"][mask].mean().item() == pytest.approx(0.0, abs=1e-5)
