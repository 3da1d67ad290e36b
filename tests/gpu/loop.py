"""A step of PPO with models of a Llama's shape, by hand.

`python -m tests.gpu.loop SIZE DEVICE CORE` makes a step for each line of its input, the step's number; test_figures.py
makes the same step by roles that share a process, with the same functions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@attrs.frozen
class Size:
    """The sizes of models and batches, with sequences in tokens."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    prompt: int
    response: int

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.prompt + self.response,
            tie_word_embeddings=True,
            # Losses must be equal: backward passes of faster attention add in a varying order.
            attn_implementation="eager",
        )


SIZES = {
    "half-a-billion": Size(1024, 28, 16, 32000, batch=32, prompt=64, response=96),
    "tiny": Size(32, 2, 2, 64, batch=4, prompt=4, response=8),
}


class Learner:
    """A model in bfloat16, and PPO's operations on it."""

    def __init__(self, size: Size, device: Any, seed: int) -> None:
        self.size = size
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = LlamaForCausalLM(size.config).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.generator = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> Tensor:
        """Return prompts (batch, prompt) with sampled responses: (batch, prompt + response)."""
        tokens, fed, cache = prompts, prompts, None
        for _ in range(self.size.response):
            out = self.model(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chances = out.logits[:, -1].float().softmax(-1)
            fed = torch.multinomial(chances, 1, generator=self.generator)
            tokens = torch.cat([tokens, fed], 1)
        return tokens

    def _log_probs(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1]).logits[:, self.size.prompt - 1 :].float()
        chosen: Tensor = logits.log_softmax(-1).gather(-1, tokens[:, self.size.prompt :, None])[..., 0]
        return chosen

    @torch.no_grad()
    def log_probs(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the responses: (batch, response)."""
        return self._log_probs(tokens)

    def _values(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.model(tokens[:, :-1]).logits[:, self.size.prompt - 1 :, 0].float()
        return values

    @torch.no_grad()
    def values(self, tokens: Tensor) -> Tensor:
        """Return the expected returns from each token on: (batch, response)."""
        return self._values(tokens)

    def _update(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def learn_policy(self, tokens: Tensor, old: Tensor, advantages: Tensor) -> float:
        """Make an update by the clipped loss (Schulman et al. 2017, equation 7)."""
        ratio = (self._log_probs(tokens) - old).exp()
        return self._update(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean())

    def learn_values(self, tokens: Tensor, returns: Tensor) -> float:
        """Make an update by the squared error."""
        return self._update((self._values(tokens) - returns).square().mean())


def advantages(old: Tensor, reference: Tensor, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both (batch, response): rewards favour even tokens and the reference."""
    good = (tokens[:, -old.shape[1] :] % 2 == 0).float()
    rewards = good - 0.01 * (old - reference)
    returns = rewards.flip(1).cumsum(1).flip(1)
    return returns - values, returns


def prompts(size: Size, step: int) -> Tensor:
    """Return the prompts of a step, on the host."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(size.vocabulary, (size.batch, size.prompt), generator=generator)


def main(size: Size, device: str, core: int) -> None:
    """Make a step for each number in the input; print the losses of values and policy, and the seconds."""
    actor, critic, reference = (Learner(size, device, seed) for seed in (1, 2, 1))
    torch.set_num_threads(1)  # One core has no room for several host threads.
    os.sched_setaffinity(0, {core})
    for line in sys.stdin:
        began = time.perf_counter()
        tokens = actor.generate(prompts(size, int(line)).to(device))
        old, other, values = actor.log_probs(tokens), reference.log_probs(tokens), critic.values(tokens)
        gains, returns = advantages(old, other, values, tokens)
        losses = critic.learn_values(tokens, returns), actor.learn_policy(tokens, old, gains)
        print(json.dumps([*losses, time.perf_counter() - began]), flush=True)


if __name__ == "__main__":
    main(SIZES[sys.argv[1]], sys.argv[2], int(sys.argv[3]))
