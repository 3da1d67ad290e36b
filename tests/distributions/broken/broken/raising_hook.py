import colocate


@colocate.hookimpl
def colocate_roles() -> dict[str, str]:
    raise ValueError("no roles today")
