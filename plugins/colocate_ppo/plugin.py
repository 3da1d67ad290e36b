"""The plugin's roles and jobs. Names only, so that a listing imports neither torch nor transformers."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the roles of namespace `ppo`."""
    return {
        "actor": "colocate_ppo.actor:Actor",
        "critic": "colocate_ppo.critic:Critic",
        "reference": "colocate_ppo.reference:Reference",
        "reward": "colocate_ppo.reward:Reward",
    }


@hookimpl
def colocate_jobs() -> dict[str, str]:
    """Return the jobs of namespace `ppo`."""
    return {"train": "colocate_ppo.job:train"}
