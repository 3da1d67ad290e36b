import colocate


@colocate.hookimpl
def colocate_roles() -> list[str]:
    return ["reward"]
