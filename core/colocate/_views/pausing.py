"""`group.pause` and `group.resume`: background roles stop between two calls, or amid one, and go on."""

from __future__ import annotations

from colocate._calls.pending import PendingCall, half_read
from colocate._signals.at_work import refuse_to_wait
from colocate._signals.off_main import off_main
from colocate._system.nearest import did_you_mean
from colocate._views.sending import refuse_inside
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError

_HOW = ("wait", "keep", "abort")


def pause(worker_group: WorkerGroup, role: str, how: str, timeout: float | None) -> None:
    """Pause a background role; see `ColocatedGroup.pause`."""
    _check(worker_group, role, "pause")
    if how not in _HOW:
        raise ConfigError(f"group.pause(how={how!r}): it is 'wait', 'keep' or 'abort'{did_you_mean(str(how), _HOW)}")
    if how == "wait" and half_read:
        ends = PendingCall(f"pause of role {role!r}", role, "pause", worker_group.roles[role].slots)
        ends.link, ends.lane = worker_group, role
        ends.refuse_behind_stream()
    off_main(lambda: worker_group.pauses.pause(role, how, timeout))


def resume(worker_group: WorkerGroup, role: str) -> None:
    """Have a background role go on; see `ColocatedGroup.resume`."""
    _check(worker_group, role, "resume")
    off_main(lambda: worker_group.pauses.resume(role))


def _check(worker_group: WorkerGroup, role: str, what: str) -> None:
    worker_group.check()
    refuse_to_wait(f"{what} of role {role!r}")
    refuse_inside(what, worker_group.name)
    if role in worker_group.background:
        return
    if role in worker_group.roles:
        raise ConfigError(
            f"group.{what}({role!r}): of group {worker_group.name!r} this is no background role, so that nothing of it "
            "goes on beside other calls: what can be paused was declared with .on(background=True)"
        )
    known = ", ".join(worker_group.background) or "none"
    raise ConfigError(
        f"group.{what}({role!r}): group {worker_group.name!r} has no such role; its background roles: {known}"
        f"{did_you_mean(str(role), worker_group.background)}"
    )
