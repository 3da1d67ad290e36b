from collections.abc import Mapping

import colocate


@colocate.hookimpl
def colocate_roles() -> Mapping[str, type | str]:
    # Strings: to list the roles, or to use one, imports no other role.
    return {"reward": "acme.reward:Reward", "judge": "acme.judge:Judge"}


@colocate.hookimpl
def colocate_jobs() -> Mapping[str, str]:
    return {"tally": "acme.jobs:tally"}
