"""The tensors in a checkpoint of the plugin's roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors_of(role: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors that a role saved, by the role's and the tensor's name."""
    stored = FileSystemReader(role).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(state, checkpoint_id=role, no_dist=True)
    return {f"{role.name}/{name}": value for name, value in state.items()}
