import colocate


@colocate.hookimpl
def colocate_engine() -> int:
    return 7
