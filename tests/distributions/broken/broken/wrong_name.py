import colocate


@colocate.hookimpl
def colocate_roles() -> dict[str, str]:
    return {"reward": "broken.roles.Fine"}
