"""Register the plugin's roles and jobs by import path, without importing torch or transformers."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the import paths of the roles in namespace `ppo`."""
    return {
        "actor": "colocate_ppo.actor:Actor",
        "critic": "colocate_ppo.critic:Critic",
        "reference": "colocate_ppo.reference:Reference",
        "reward": "colocate_ppo.reward:Reward",
    }


@hookimpl
def colocate_jobs() -> dict[str, str]:
    """Return the import paths of the jobs in namespace `ppo`."""
    return {"train": "colocate_ppo.job:train"}
