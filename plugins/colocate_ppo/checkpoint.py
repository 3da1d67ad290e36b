"""Save and restore models with torch.distributed.checkpoint, on any number of ranks.

Functions import torch.distributed.checkpoint when called, because the import takes a second.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colocate import ConfigError, Context
from colocate_ppo.learner import Learner
from colocate_ppo.parallel import gather_numbers
from colocate_ppo.spread import SpreadModel

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MODEL, _MOMENTS = "model", "optimizer"
# A single rank without process groups is intended (`no_dist`), so torch's warning about this is noise.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def save(ctx: Context, directory: str, model: SpreadModel, learner: Learner | None = None) -> None:
    """Write a role's model and optimizer moments to a checkpoint folder.

    Each rank writes its part of a sharded model. Calls continue during the write if the checkpoint doesn't wait.

    Args:
        ctx: The role's context.
        directory: An existing folder of the role's own, writable by all ranks.
        model: The model.
        learner: The model's learner; None for a model without training.

    Raises:
        FloatingPointError: A weight isn't finite. The last checkpoint stays; all ranks raise.
    """
    from colocate.torch import save_state

    bad = [name for name, parameter in model.module.named_parameters() if not _is_finite(parameter)]
    if any(gather_numbers(ctx, len(bad))):
        where = f"{bad[0]} and {len(bad) - 1} more" if bad else "those of another rank"
        raise FloatingPointError(
            f"role {ctx.role!r} writes no checkpoint: weights aren't finite ({where}); the last checkpoint is as it was"
        )
    state: dict[str, Any] = {_MODEL: model.module.state_dict()}
    if learner is not None and (moments := learner.optimizer_state()):
        state[_MOMENTS] = moments
    save_state(state, directory, ctx)
    if ctx.rank == 0:
        config: Any = model.module.config
        config.save_pretrained(directory)


def read_config(ctx: Context, directory: str) -> Any:
    """Return the transformers config of the model in a checkpoint.

    Raises:
        ConfigError: The folder has no complete checkpoint.
    """
    from transformers import AutoConfig

    _read_metadata(ctx, directory)
    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def restore(ctx: Context, directory: str, model: SpreadModel, learner: Learner | None = None) -> None:
    """Restore a model and the optimizer from a checkpoint that any number of ranks wrote.

    Raises:
        ConfigError: The folder has no complete checkpoint, or the checkpoint of another model.
    """
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    written = _read_metadata(ctx, directory)
    state: dict[str, Any] = {_MODEL: model.module.state_dict()}
    for name, tensor in state[_MODEL].items():
        size = getattr(written.state_dict_metadata.get(f"{_MODEL}.{name}"), "size", None)
        if size != tensor.shape:
            sizes = "nothing" if size is None else list(size)
            raise ConfigError(
                f"role {ctx.role!r} can't be restored from {directory}, which is of another model: "
                f"{name} is {[*tensor.shape]} here, there it is {sizes}"
            )
    moments: dict[str, list[str]] = {}
    for path in written.planner_data.values():
        if path[0] == _MOMENTS:
            moments.setdefault(path[1], []).append(path[2])
    if learner is not None and (room := learner.make_room(moments)):
        state[_MOMENTS] = room
    load_state(state, checkpoint_id=directory, **_count_ranks(ctx))


def _read_metadata(ctx: Context, directory: str) -> Metadata:
    """Return a checkpoint's metadata; raise a ConfigError if the folder has no complete checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return FileSystemReader(directory).read_metadata()
    except FileNotFoundError:
        raise ConfigError(
            f"role {ctx.role!r} can't be restored from {directory}: torch.distributed.checkpoint has written nothing "
            "there that is complete"
        ) from None


def _count_ranks(ctx: Context) -> dict[str, Any]:
    return {"no_dist": True} if ctx.world_size == 1 else {"process_group": ctx.process_group()}


def _is_finite(parameter: Tensor) -> bool:
    local: Tensor = getattr(parameter, "to_local", lambda: parameter)()  # Only DTensors have `to_local`.
    return bool(local.isfinite().all())
