"""Functions for `group.run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import colocate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Row = tuple[int, tuple[int, ...]]


def worker_facts(ctx: colocate.Context, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a function's view of its worker, and its arguments."""
    return {
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "slot": ctx.slot,
        "node": ctx.node,
        "role": ctx.role,
        "group": ctx.group,
        "generation": ctx.generation,
        "mesh": dict(ctx.mesh.shape),
        "same": colocate.context() is ctx,
        "args": args,
        "kwargs": kwargs,
    }


def sum_ranks(ctx: colocate.Context, failing: int | None = None) -> float:
    """Return the sum of the ranks by a collective, which one rank may fail to join."""
    import torch
    import torch.distributed as dist

    group: ProcessGroup = ctx.process_group()
    if ctx.rank == failing:
        raise ValueError(f"rank {failing} left before the collective")
    tensor = torch.tensor([float(ctx.rank)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)
