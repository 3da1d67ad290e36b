import colocate


@colocate.hookimpl
def colocate_rolls() -> dict[str, str]:
    return {"reward": "broken.roles:Fine"}
