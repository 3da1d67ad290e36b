import colocate


@colocate.hookimpl
def colocate_roles(config: object) -> dict[str, str]:
    return {}
