"""Data parallelism over a role's ranks. A single rank sends no messages and doesn't use torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colocate import Context
from colocate_ppo.maths import Total, sum_alone


def make_total(ctx: Context) -> Total:
    """Return a function that sums a tensor over all ranks and returns the sum on each rank."""
    if ctx.world_size == 1:
        return sum_alone

    def summed(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        dist.all_reduce(result, group=ctx.process_group())
        return result

    return summed


def gather_numbers(ctx: Context, number: int) -> list[int]:
    """Gather one number from each rank; return the list on all ranks."""
    numbers = torch.zeros(ctx.world_size, dtype=torch.int64, device=ctx.device)
    numbers[ctx.rank] = number
    return [int(n) for n in make_total(ctx)(numbers)]


def step_generator(ctx: Context, number: int | None) -> torch.Generator:
    """Return the rank's random generator, seeded for a step.

    The random numbers depend only on the rank's seed and the step, so that a repeated call and a resumed run draw the
    numbers of an uninterrupted run.

    Args:
        ctx: The role's context.
        number: The step's number; None leaves the generator's state unchanged.
    """
    generator = ctx.generator
    return generator if number is None else generator.manual_seed((ctx.seed + number) % (1 << 63))


def count_minibatches(counts: Sequence[int], size: int) -> int:
    """Return the number of minibatches of `size` rows in an epoch; `counts` has the rows on each rank."""
    return -(-sum(counts) // size)


def split_minibatches(counts: Sequence[int], rank: int, size: int, epochs: int) -> list[Tensor]:
    """Return one rank's rows of each minibatch; all ranks have the same number of minibatches.

    A row's number in the whole batch decides its minibatch, so the number of ranks doesn't matter. With k minibatches
    in an epoch, each minibatch has one of any k consecutive rows, so ranks with contiguous parts do equal work; each
    epoch combines rows differently. Rows aren't shuffled, because the batch was drawn at random.

    Args:
        counts: Rows on each rank; contiguous in the batch, in the order of the ranks.
        rank: The rank.
        size: Rows of a minibatch over all ranks.
        epochs: How often each row is used.

    Returns:
        Row numbers within the rank's part for each minibatch in turn, int64, maybe none.
    """
    k = count_minibatches(counts, size)
    number = torch.arange(counts[rank]) + sum(counts[:rank])
    turns = [(number + epoch * (number // k)) % k for epoch in range(epochs)]
    return [torch.nonzero(turn == index).flatten() for turn in turns for index in range(k)]


def split_evenly(tokens: Tensor, k: int, epochs: int) -> list[Tensor]:
    """Return one rank's rows of each minibatch; minibatches have about equal numbers of tokens.

    The longest rows are dealt first, back and forth; each epoch combines rows differently.

    Args:
        tokens: `[B]`, the number of tokens of this rank's rows.
        k: Minibatches in an epoch, equal on all ranks.
        epochs: How often each row is used.

    Returns:
        Row numbers within the rank's part for each minibatch in turn, int64, maybe none.
    """
    rows = tokens.argsort(descending=True, stable=True)
    turn, place = torch.arange(len(rows)) // k, torch.arange(len(rows)) % k
    dealt = torch.where(turn % 2 == 0, place, k - 1 - place)
    epoch_deals = [(dealt + epoch * turn) % k for epoch in range(epochs)]
    return [rows[deal == index] for deal in epoch_deals for index in range(k)]
