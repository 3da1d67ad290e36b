"""Data parallelism over a role's ranks. With one rank nothing is sent and torch.distributed isn't touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    k = -(-sum(counts) // size)
    number = torch.arange(counts[rank]) + sum(counts[:rank])
    turns = [(number + epoch * (number // k)) % k for epoch in range(epochs)]
    return [torch.nonzero(turn == index).flatten() for turn in turns for index in range(k)]


class Learner:
    """A model with its AdamW and the data-parallel step: gradients are summed over the ranks, then clipped.

    Args:
        model: The model, the same on every rank.
        lr: Learning rate; each step scales it.
        max_norm: The norm to which gradients are clipped.
    """

    def __init__(self, model: nn.Module, lr: float, max_norm: float = 1.0) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=0.0)
        self.lr = lr
        self.max_norm = max_norm

    def forget(self) -> None:
        """Drop the moments of all steps so far, and their memory."""
        self.optimizer.state.clear()

    def step(self, ctx: Context, loss: Tensor, lr_scale: float = 1.0) -> float:
        """Go one step down.

        Args:
            ctx: The role's context.
            loss: This rank's part of a sum over the ranks.
            lr_scale: Multiplies the learning rate.

        Returns:
            The norm of the gradient before clipping.
        """
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        if ctx.world_size > 1:
            _sum_gradients(ctx, self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        self.optimizer.step()
        return norm.item()


def _sum_gradients(ctx: Context, parameters: Iterable[Tensor]) -> None:
    """All gradients as one message: small ones cost their latency, not their bytes."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=ctx.process_group())
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


class Means:
    """Means over a call's minibatches.

    Args:
        count: The number of minibatches.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: dict[str, float] = {}

    def add(self, **values: Tensor | float) -> None:
        """Add what one minibatch gave."""
        for name, value in values.items():
            number = value.item() if isinstance(value, Tensor) else value
            self.values[name] = self.values.get(name, 0.0) + number / self.count
