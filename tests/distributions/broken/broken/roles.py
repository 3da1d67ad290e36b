from collections.abc import Mapping

import colocate


class Methodless:
    def score(self, text: str) -> float:
        return float(len(text))


def function(text: str) -> float:
    return float(len(text))


@colocate.hookimpl
def colocate_roles() -> Mapping[str, type | str]:
    return {"methodless": Methodless, "function": "broken.roles:function", "absent": "broken.roles:Methodles"}


@colocate.hookimpl
def colocate_jobs() -> Mapping[str, str]:
    return {"number": "broken.roles:__name__"}
