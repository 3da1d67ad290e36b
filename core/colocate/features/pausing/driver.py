"""Implements `group.pause` and `group.resume`, which stop background roles between two calls or amid a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate._calls.pending import PendingCall, blocked_calls
from colocate._calls.sending import refuse_inside
from colocate._protocol.message import Message
from colocate._signals.in_framework import check_may_wait
from colocate._system.nearest import did_you_mean
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError
from colocate.features.pausing.messages import PauseBegun, RoleAtRest
from colocate.features.pausing.pauses import Pauses

_HOW = ("wait", "keep", "abort")


class PausingOfGroup(GroupFeature):
    """The pauses of a group's background roles. A new generation of workers starts without pauses."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._pauses = Pauses(worker_group.order)

    def on_restarted(self) -> None:
        """Drop all pauses, because the new workers aren't paused."""
        self._pauses = Pauses(self._worker_group.order)

    def on_failed(self, error: ColocateError) -> None:
        """Fail the waits of all pauses with the group's error."""
        self._pauses.fail_requests(error)

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a rank's answer: no further call begins on the rank, or the role is at rest."""
        assert isinstance(message, PauseBegun | RoleAtRest)
        self._pauses.on_answer(worker.slot, message)

    def is_paused(self, role: str) -> bool:
        """Return whether a role is paused or about to be."""
        return self._pauses.is_paused(role)

    def check_send(self, call: PendingCall) -> None:
        """Refuse a call on all roles if the call would wait for a paused role."""
        self._pauses.check_call(call)

    def role_attributes(self, role: str) -> Mapping[str, bool]:
        """Return the mark that the graph shows for a paused role; empty if the role isn't paused."""
        return {"paused": True} if self.is_paused(role) else {}

    def pause_role(self, role: str, how: str, timeout: float | None) -> None:
        """Pause a background role; see `ColocatedGroup.pause`."""
        pause_role(self._worker_group, self._pauses, role, how, timeout)

    def resume_role(self, role: str) -> None:
        """Resume a background role; see `ColocatedGroup.resume`."""
        resume_role(self._worker_group, self._pauses, role)


def pause_role(worker_group: WorkerGroup, pauses: Pauses, role: str, how: str, timeout: float | None) -> None:
    """Pause a background role after checks of the group, the role and `how`."""
    _check_background(worker_group, role, "pause")
    if how not in _HOW:
        raise ConfigError(f"group.pause(how={how!r}): it is 'wait', 'keep' or 'abort'{did_you_mean(str(how), _HOW)}")
    if how == "wait" and blocked_calls:
        ends = PendingCall(f"pause of role {role!r}", role, "pause", worker_group.roles[role].slots)
        ends.link, ends.lane = worker_group, role
        ends.check_deadlock()
    pauses.pause_role(role, how, timeout)


def resume_role(worker_group: WorkerGroup, pauses: Pauses, role: str) -> None:
    """Resume a background role after checks of the group and the role."""
    _check_background(worker_group, role, "resume")
    pauses.resume_role(role)


def _check_background(worker_group: WorkerGroup, role: str, what: str) -> None:
    worker_group.check_usable()
    check_may_wait(f"{what} of role {role!r}")
    refuse_inside(what, worker_group.name)
    if role in worker_group.background:
        return
    if role in worker_group.roles:
        raise ConfigError(
            f"group.{what}({role!r}): this role of group {worker_group.name!r} is no background role, and only "
            "background roles can be paused: declare the role with .on(background=True)"
        )
    names = ", ".join(worker_group.background) or "none"
    raise ConfigError(
        f"group.{what}({role!r}): group {worker_group.name!r} has no such role; its background roles: {names}"
        f"{did_you_mean(str(role), worker_group.background)}"
    )
