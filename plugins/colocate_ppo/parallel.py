"""Data parallelism over a role's ranks. A single rank sends nothing and doesn't touch torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colocate import Context
from colocate_ppo.maths import Total, alone


def total(ctx: Context) -> Total:
    """Return a function that sums a tensor over the ranks; every rank gets the sum, as a new tensor."""
    if ctx.world_size == 1:
        return alone

    def summed(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        dist.all_reduce(result, group=ctx.process_group())
        return result

    return summed


def per_rank(ctx: Context, number: int) -> list[int]:
    """Gather one number from each rank, on all ranks."""
    numbers = torch.zeros(ctx.world_size, dtype=torch.int64, device=ctx.device)
    numbers[ctx.rank] = number
    return [int(n) for n in total(ctx)(numbers)]


def drawing(ctx: Context, number: int | None) -> torch.Generator:
    """Return the rank's generator, at the start of a step's random numbers.

    The numbers depend only on the rank's seed and the step: a repeated call draws the same numbers, and a resumed run
    draws the numbers of an uninterrupted run.

    Args:
        ctx: The role's context.
        number: The step's number; None leaves the generator's state unchanged.
    """
    generator = ctx.generator
    return generator if number is None else generator.manual_seed((ctx.seed + number) % (1 << 63))


def how_many(counts: Sequence[int], size: int) -> int:
    """Return the number of minibatches in an epoch, from the number of rows on each rank."""
    return -(-sum(counts) // size)


def minibatches(counts: Sequence[int], rank: int, size: int, epochs: int) -> list[Tensor]:
    """Return one rank's rows of each minibatch; all ranks have the same number of minibatches.

    The rows' numbers in the whole batch decide the minibatch, so the number of ranks doesn't matter. With k minibatches
    an epoch, each minibatch has one of any k consecutive rows, so ranks with contiguous parts do equal work; each epoch
    combines rows differently. No shuffling: the batch was drawn at random.

    Args:
        counts: Rows on each rank; contiguous in the batch, in the order of the ranks.
        rank: The rank.
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
    """Return one rank's rows of each minibatch, with about equal numbers of tokens in each.

    The longest rows are dealt first, back and forth; each epoch combines rows differently.

    Args:
        tokens: `[B]`, the number of tokens of this rank's rows.
        k: Minibatches in an epoch, equal on all ranks.
        epochs: How often each row is used.

    Returns:
        Row numbers within the rank's part, int64, maybe none; for each minibatch in turn.
    """
    rows = tokens.argsort(descending=True, stable=True)
    turn, place = torch.arange(len(rows)) // k, torch.arange(len(rows)) % k
    dealt = torch.where(turn % 2 == 0, place, k - 1 - place)
    epoch_deals = [(dealt + epoch * turn) % k for epoch in range(epochs)]
    return [rows[deal == index] for deal in epoch_deals for index in range(k)]
