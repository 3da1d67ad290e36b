from collections.abc import Mapping

import colocate


@colocate.hookimpl
def colocate_roles() -> Mapping[str, type | str]:
    # Strings: whoever lists the roles, or uses one, imports no other.
    return {"reward": "acme.reward:Reward", "judge": "acme.judge:Judge"}


@colocate.hookimpl
def colocate_jobs() -> Mapping[str, str]:
    return {"tally": "acme.jobs:tally"}
