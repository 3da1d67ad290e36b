"""Groups that were lost while a job ran, and made anew: what that has cost."""

from __future__ import annotations

import attrs

from colocate.errors import ColocateError


@attrs.frozen
class Restart:
    """One of a group."""

    group: str  # the group's name
    what: str  # what it was lost by, in words: "worker 1 was killed"
    at: float  # when, in seconds of time.time()
    ready: float  # when it could be called again
    since: float  # when the state was saved that it went on from; of what came after that, the time is lost

    @property
    def lost(self) -> float:
        """Seconds that have to be done once more, and those without the group."""
        return self.ready - self.since


def lost_by(group: str, cause: ColocateError | None) -> str:
    """What a group was lost by, in words."""
    if cause is None or cause.rank is None:
        return f"group {group} failed"
    if cause.signal == "SIGKILL":
        return f"worker {cause.rank} was killed"
    if cause.signal is not None:
        return f"worker {cause.rank} was ended by {cause.signal}"
    return f"worker {cause.rank} " + ("failed" if cause.exitcode is None else f"exited with code {cause.exitcode}")
