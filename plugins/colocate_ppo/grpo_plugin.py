"""The plugin's roles and jobs in the namespace `grpo`. Names only, as in `plugin`."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the roles of namespace `grpo`."""
    return {"actor": "colocate_ppo.group_actor:GroupActor"}


@hookimpl
def colocate_jobs() -> dict[str, str]:
    """Return the jobs of namespace `grpo`."""
    return {"train": "colocate_ppo.grpo:train"}
