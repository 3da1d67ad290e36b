from collections.abc import Mapping

import colocate


@colocate.hookimpl
def colocate_roles() -> Mapping[str, type | str]:
    return {"reward": "acme.reward:Reward"}
