"""Register the roles and jobs of the namespace `grpo` by import path, without importing the classes."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the import paths of the roles in namespace `grpo`."""
    return {"actor": "colocate_ppo.group_actor:GroupActor"}


@hookimpl
def colocate_jobs() -> dict[str, str]:
    """Return the import paths of the jobs in namespace `grpo`."""
    return {"train": "colocate_ppo.grpo:train"}
