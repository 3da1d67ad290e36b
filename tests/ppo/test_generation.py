"""The actor's generation: cache, padding, sampling and ends."""

from __future__ import annotations

import pytest
import torch

from colocate_ppo.actor import Actor
from colocate_ppo.generation import generate
from colocate_ppo.task import Problems
from colocate_ppo.tokenizer import PaddedRows

R = 9


def prompts(actor: Actor, problems: Problems) -> PaddedRows:
    return actor.tokenizer.encode_prompts(problems.questions, torch.device("cpu"))


def greedy(actor: Actor, prompts: PaddedRows) -> PaddedRows:
    pad, ends = actor.tokenizer.pad, actor.tokenizer.ends
    return generate(actor.model, prompts, max_new_tokens=R, ends=ends, pad=pad)


def by_hand(actor: Actor, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens, one by one from the whole text: without a cache, padding or a batch."""
    tokens = list(prompt)
    for _ in range(R):
        with torch.no_grad():
            logits = actor.model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in actor.tokenizer.ends:
            break
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_step_by_step(actor: Actor, problems: Problems) -> None:
    batch = prompts(actor, problems)
    answers = greedy(actor, batch)
    assert len(set(batch.mask.sum(1).tolist())) > 1  # Equal lengths would need no padding.
    for row in range(len(problems)):
        expected = by_hand(actor, batch.tokens[row][batch.mask[row]].tolist())
        assert answers.tokens[row][answers.mask[row]].tolist() == expected


def test_answer_is_padded_after_end(actor: Actor, problems: Problems) -> None:
    ends, pad = actor.tokenizer.ends, actor.tokenizer.pad
    (end,) = ends
    generator = torch.Generator().manual_seed(0)
    answers = generate(
        actor.model,
        prompts(actor, Problems.from_list([*problems] * 20)),
        max_new_tokens=R,
        ends=ends,
        pad=pad,
        temperature=8.0,
        generator=generator,
    )
    lengths = answers.mask.sum(1)
    assert answers.tokens.shape == answers.mask.shape == (240, R)
    assert (lengths < R).any()
    for row, length in enumerate(lengths.tolist()):
        assert answers.mask[row].tolist() == [True] * length + [False] * (R - length)
        assert answers.tokens[row, length:].eq(pad).all()
        places = answers.tokens[row].eq(end).nonzero().flatten().tolist()
        assert places == ([length - 1] if length < R else places[:1])


def test_generation_stops_when_every_answer_has_ended(actor: Actor, problems: Problems) -> None:
    batch = prompts(actor, problems[:1])
    (first,) = greedy(actor, batch).tokens[:, 0].tolist()
    answers = generate(actor.model, batch, max_new_tokens=R, ends=[first], pad=actor.tokenizer.pad)
    assert answers.tokens.tolist() == [[first] + [actor.tokenizer.pad] * (R - 1)]
    assert answers.mask.sum() == 1


def test_samples_follow_the_distribution(actor: Actor, problems: Problems) -> None:
    batch = prompts(actor, problems[:1])
    many = PaddedRows(batch.tokens.expand(4_000, -1), batch.mask.expand(4_000, -1))
    generator = torch.Generator().manual_seed(0)
    pad, ends = actor.tokenizer.pad, actor.tokenizer.ends
    sampled = generate(
        actor.model, many, max_new_tokens=1, ends=ends, pad=pad, temperature=0.5, generator=generator
    ).tokens
    with torch.no_grad():
        expected = (actor.model(input_ids=batch.tokens).logits[0, -1] / 0.5).softmax(dim=-1)
    found = sampled.flatten().bincount(minlength=len(expected)) / len(sampled)
    assert (found - expected).abs().max().item() < 0.02
    assert expected.max().item() > 0.1


@pytest.mark.parametrize("other_seed", [0, 1])
def test_samples_depend_on_the_generator_alone(actor: Actor, problems: Problems, other_seed: int) -> None:
    def sample(seed: int) -> torch.Tensor:
        return generate(
            actor.model,
            prompts(actor, problems),
            max_new_tokens=R,
            ends=actor.tokenizer.ends,
            pad=actor.tokenizer.pad,
            temperature=4.0,
            generator=torch.Generator().manual_seed(seed),
        ).tokens

    torch.manual_seed(other_seed)
    assert sample(0).equal(sample(other_seed)) is (other_seed == 0)
