import colocate


@colocate.hookimpl
def colocate_observer() -> int:
    return 7
