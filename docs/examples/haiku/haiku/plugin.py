import colocate


@colocate.hookimpl
def colocate_roles() -> dict[str, str]:
    """The roles of this namespace."""
    return {"counter": "haiku.roles:Counter"}


@colocate.hookimpl
def colocate_jobs() -> dict[str, str]:
    """The jobs of this namespace."""
    return {"review": "haiku.jobs:review"}
