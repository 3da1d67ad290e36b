"""Generate text in batches from a causal language model, by sampling or greedily, with a key-value cache."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from colocate_ppo.forward import Model, token_positions
from colocate_ppo.tokenizer import PaddedRows


@torch.no_grad()
def generate(
    model: Model,
    prompts: PaddedRows,
    *,
    max_new_tokens: int,
    ends: Collection[int],
    pad: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> PaddedRows:
    """Generate tokens after each prompt, up to an end token or `max_new_tokens`.

    Args:
        model: A causal language model.
        prompts: `[B, P]`, padded on the left.
        max_new_tokens: R; the result has this width even if all answers end early.
        ends: The tokens that end an answer.
        pad: The token after an answer's end.
        temperature: Divides the logits before sampling.
        generator: The source of randomness, on the model's device; None takes the likeliest token each time.

    Returns:
        The responses `[B, R]`, padded on the right after their end token.

    Raises:
        FloatingPointError: The model's logits aren't finite.
    """
    inputs, attention = prompts.tokens, prompts.mask
    responses = inputs.new_full((len(inputs), max_new_tokens), pad)
    mask = torch.zeros_like(responses, dtype=torch.bool)
    alive = torch.ones_like(attention[:, 0])
    last = inputs.new_tensor([*ends])
    places, cache = token_positions(attention), None
    for step in range(max_new_tokens):
        output = model(
            input_ids=inputs,
            attention_mask=attention,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        token = _choose_tokens(output.logits[:, -1].float(), temperature, generator)
        responses[:, step] = torch.where(alive, token, pad)
        mask[:, step] = alive
        alive = alive & ~torch.isin(token, last)
        if not alive.any():
            break
        cache, inputs, places = output.past_key_values, responses[:, step, None], places[:, -1:] + 1
        # A finished row stays in the batch with unread padding, which is cheaper than a smaller batch.
        attention = torch.cat([attention, torch.ones_like(attention[:, :1])], dim=1)
    return PaddedRows(responses, mask)


def _choose_tokens(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        logits = logits / temperature
    # Check before drawing a token, because drawing from non-finite logits on a GPU would kill the process.
    if not logits.logsumexp(dim=-1).isfinite().all():
        raise FloatingPointError(
            "the model's logits are no numbers, so no token can be drawn: its weights, or what it computes in its "
            "dtype, aren't finite"
        )
    if generator is None:
        return logits.argmax(dim=-1)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
