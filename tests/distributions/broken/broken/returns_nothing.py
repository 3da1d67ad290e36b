import colocate


@colocate.hookimpl
def colocate_roles() -> None: ...
