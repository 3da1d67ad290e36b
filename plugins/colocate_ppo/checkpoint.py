"""Models in a checkpoint's folder, written by torch.distributed.checkpoint: any number of ranks can read them.

That is imported by who writes or reads: it takes a second.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import ConfigError, Context
from colocate_ppo.learner import Learner
from colocate_ppo.spread import SpreadModel

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MODEL, _MOMENTS = "model", "optimizer"
# One rank without process groups is what is meant, and said by `no_dist`.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def save(ctx: Context, directory: str, model: SpreadModel, learner: Learner | None = None) -> None:
    """Write a role's model and the moments of its optimizer; of a sharded one each rank writes its part.

    Args:
        ctx: The role's context.
        directory: An existing folder that all ranks can write to. The role has one of its own in it.
        model: The model.
        learner: What trains it.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    state: dict[str, Any] = {_MODEL: model.module.state_dict()}
    if learner is not None and (moments := learner.state()):
        state[_MOMENTS] = moments
    folder = _folder(ctx, directory)
    save_state(state, checkpoint_id=folder, **_ranks(ctx))
    if ctx.rank == 0:
        config: Any = model.module.config
        config.save_pretrained(folder)


def config_of(ctx: Context, directory: str) -> Any:
    """The config of the model that `save` wrote, as transformers has it.

    Raises:
        ConfigError: There is no such model.
    """
    from transformers import AutoConfig

    _written(ctx, directory)
    return AutoConfig.from_pretrained(_folder(ctx, directory), trust_remote_code=False)


def restore(ctx: Context, directory: str, model: SpreadModel, learner: Learner | None = None) -> None:
    """Have a model and its optimizer go on where `save` was called, by as many ranks or others.

    Raises:
        ConfigError: There is no such model, or it is another one.
    """
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    written = _written(ctx, directory)
    state: dict[str, Any] = {_MODEL: model.module.state_dict()}
    for name, tensor in state[_MODEL].items():
        there = getattr(written.state_dict_metadata.get(f"{_MODEL}.{name}"), "size", None)
        if there != tensor.shape:
            sizes = "nothing" if there is None else list(there)
            raise ConfigError(
                f"role {ctx.role!r} can't be restored from {_folder(ctx, directory)}, which is of another model: "
                f"{name} is {[*tensor.shape]} here, there it is {sizes}"
            )
    moments: dict[str, list[str]] = {}
    for path in written.planner_data.values():
        if path[0] == _MOMENTS:
            moments.setdefault(path[1], []).append(path[2])
    if learner is not None and (room := learner.room(moments)):
        state[_MOMENTS] = room
    load_state(state, checkpoint_id=_folder(ctx, directory), **_ranks(ctx))


def _written(ctx: Context, directory: str) -> Metadata:
    """What there is."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder = _folder(ctx, directory)
    try:
        return FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        former = Path(directory, f"{ctx.role}.pt")
        why = f"; {former.name} is of an earlier version of this plugin" if former.exists() else ""
        raise ConfigError(
            f"role {ctx.role!r} can't be restored from {folder}: torch.distributed.checkpoint has written nothing "
            f"there that is complete{why}"
        ) from None


def _folder(ctx: Context, directory: str) -> Path:
    return Path(directory, str(ctx.role))


def _ranks(ctx: Context) -> dict[str, Any]:
    return {"no_dist": True} if ctx.world_size == 1 else {"process_group": ctx.process_group()}
