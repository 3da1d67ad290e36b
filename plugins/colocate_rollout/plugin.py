"""The plugin's roles. Names only, so that a listing imports neither torch nor an engine."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the roles of namespace `rollout`."""
    return {"engine": "colocate_rollout.role:EngineRole"}
