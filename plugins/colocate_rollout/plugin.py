"""Register the plugin's roles by import path, without importing torch or an engine."""

from __future__ import annotations

from colocate import hookimpl


@hookimpl
def colocate_roles() -> dict[str, str]:
    """Return the import paths of the roles in namespace `rollout`."""
    return {"engine": "colocate_rollout.role:EngineRole"}
