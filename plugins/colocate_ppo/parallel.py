"""Data parallelism over a role's ranks. With one rank nothing is sent and torch.distributed isn't touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colocate import Context
from colocate_ppo.maths import Total, alone


def total(ctx: Context) -> Total:
    """The function that sums a tensor over the ranks; every rank gets the sum, as a new tensor."""
    if ctx.world_size == 1:
        return alone

    def summed(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        dist.all_reduce(result, group=ctx.process_group())
        return result

    return summed


def per_rank(ctx: Context, number: int) -> list[int]:
    """One number of each rank, known to all."""
    numbers = torch.zeros(ctx.world_size, dtype=torch.int64, device=ctx.device)
    numbers[ctx.rank] = number
    return [int(n) for n in total(ctx)(numbers)]


def drawing(ctx: Context, number: int | None) -> torch.Generator:
    """The rank's generator, at the beginning of the numbers that belong to a step.

    They depend on the rank's seed and the step alone: a call that is done again draws what it drew, and a run that is
    resumed what it would have drawn.

    Args:
        ctx: The role's context.
        number: That of the step; None leaves the generator where it is.
    """
    generator = ctx.generator
    return generator if number is None else generator.manual_seed((ctx.seed + number) % (1 << 63))


def how_many(counts: Sequence[int], size: int) -> int:
    """Return how many minibatches there are in an epoch, of rows that are so many on each rank."""
    return -(-sum(counts) // size)


def minibatches(counts: Sequence[int], rank: int, size: int, epochs: int) -> list[Tensor]:
    """One rank's rows of each minibatch; for every rank the same number of minibatches.

    Which rows make a minibatch is defined by their numbers in the whole batch, so it doesn't depend on the number of
    ranks. With k minibatches an epoch, of each k consecutive rows every minibatch has one, hence ranks with contiguous
    parts do equal work; in each epoch other rows meet. No shuffling: the batch was drawn at random.

    Args:
        counts: How many rows each rank has; they are contiguous in the batch, in the order of the ranks.
        rank: Whose rows.
        size: Rows of a minibatch over all ranks.
        epochs: How often each row is used.

    Returns:
        Row numbers within the rank's part, int64, maybe none; for each minibatch in turn.
    """
    k = how_many(counts, size)
    number = torch.arange(counts[rank]) + sum(counts[:rank])
    turns = [(number + epoch * (number // k)) % k for epoch in range(epochs)]
    return [torch.nonzero(turn == index).flatten() for turn in turns for index in range(k)]


def even_minibatches(tokens: Tensor, k: int, epochs: int) -> list[Tensor]:
    """One rank's rows of each minibatch, where these are to have as many tokens each.

    The longest rows are dealt out first, forth and back; in each epoch other rows meet.

    Args:
        tokens: `[B]`, how many each row of this rank has.
        k: Minibatches in an epoch, as many on every rank.
        epochs: How often each row is used.

    Returns:
        Row numbers within the rank's part, int64, maybe none; for each minibatch in turn.
    """
    rows = tokens.argsort(descending=True, stable=True)
    turn, place = torch.arange(len(rows)) // k, torch.arange(len(rows)) % k
    dealt = torch.where(turn % 2 == 0, place, k - 1 - place)
    epoch_deals = [(dealt + epoch * turn) % k for epoch in range(epochs)]
    return [rows[deal == index] for deal in epoch_deals for index in range(k)]
