"""Files of a role in a checkpoint folder: one for what all ranks share, one per rank for its random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colocate import Context


def save(ctx: Context, directory: str, state: Mapping[str, Any]) -> None:
    """Write a role's state, which is the same on every rank, and this rank's generator.

    Args:
        ctx: The role's context.
        directory: An existing folder that all ranks can write to.
        state: Tensors, numbers, texts, and dicts and lists of them.
    """
    if ctx.rank == 0:
        torch.save(dict(state), _shared(ctx, directory))
    torch.save(ctx.generator.get_state(), _own(ctx, directory))


def restore(ctx: Context, directory: str) -> dict[str, Any]:
    """What `save` was given; the generator goes on where it was (a rank that is new starts afresh)."""
    if _own(ctx, directory).exists():
        ctx.generator.set_state(torch.load(_own(ctx, directory), map_location="cpu", weights_only=True))
    state: dict[str, Any] = torch.load(_shared(ctx, directory), map_location=ctx.device, weights_only=True)
    return state


def _shared(ctx: Context, directory: str) -> Path:
    return Path(directory, f"{ctx.role}.pt")


def _own(ctx: Context, directory: str) -> Path:
    return Path(directory, f"{ctx.role}-random-{ctx.rank}.pt")
