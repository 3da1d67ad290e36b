"""What the plugin offers. Names only, so that listing them imports neither torch nor transformers."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """The roles of namespace `ppo`."""
    return {
        "actor": "colocate_ppo.actor:Actor",
        "critic": "colocate_ppo.critic:Critic",
        "reference": "colocate_ppo.reference:Reference",
        "reward": "colocate_ppo.reward:Reward",
    }


@hookimpl
def colocate_jobs() -> dict[str, str]:
    """The jobs of namespace `ppo`."""
    return {"train": "colocate_ppo.job:train"}
