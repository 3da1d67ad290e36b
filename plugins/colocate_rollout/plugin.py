"""What the plugin offers. Names only, so that listing them imports neither torch nor an engine."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """The roles of namespace `rollout`."""
    return {"engine": "colocate_rollout.role:EngineRole"}
