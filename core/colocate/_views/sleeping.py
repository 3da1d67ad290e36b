"""`group.sleep` and `group.wake`: calls in the group's order like any other, which all workers do or none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from colocate._calls.pending import PendingCall
from colocate._plugins.needs import require
from colocate._role.method import DISCARDABLE, TAGS
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import FOREVER_S
from colocate._values.dispatch import plan
from colocate._views.sending import arguments, everyone, note, outcomes, ready, recording, refuse_inside, start
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError, MemoryBudgetError, RoleError
from colocate.executor import OwnProcess
from colocate.worker.serving.functions import SLEEP, SPECS, WAKE

_ON_CALL = ("wake", "fail")


def sleep(
    worker_group: WorkerGroup,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> int:
    """Put memory of a role to sleep; see `ColocatedGroup.sleep`."""
    refuse_to_wait(f"the sleep of {role}")
    return _result(worker_group, role, start_sleep(worker_group, role, tags, timeout, on_call, discard), "put to sleep")


def start_sleep(
    worker_group: WorkerGroup,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> PendingCall:
    """Send a sleep to all workers."""
    require(type(worker_group.services.executor), OwnProcess, "have a role sleep (group.sleep)")
    chosen = _tags(worker_group, role, tags, "sleep")
    lost = _discarded(chosen, discard)
    if on_call not in _ON_CALL:
        meant = did_you_mean(str(on_call), _ON_CALL)
        raise ConfigError(f"group.sleep(on_call={on_call!r}): it is 'wake' or 'fail'{meant}")
    until_woken = on_call == "fail"
    if until_woken and worker_group.declared.budgets.swap:
        raise ConfigError(
            f"group.sleep(on_call='fail'): roles of group {worker_group.name!r} take turns (residency='swap'), and "
            "wake for their calls"
        )
    worker_group.sleepers.mark(role, chosen, until_woken)
    worker_group.home.changed()
    given = {**arguments(worker_group, role, chosen), "discard": lost}
    call = _start(worker_group, SLEEP, f"sleep of {role}", given, timeout)
    worker_group.sleepers.mark(role, chosen, until_woken)  # what has woken it before that doesn't count
    return call


def wake(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, timeout: float | None) -> int:
    """Wake memory of a role; see `ColocatedGroup.wake`."""
    refuse_to_wait(f"the wake of {role}")
    return _result(worker_group, role, start_wake(worker_group, role, tags, timeout), "woken")


def start_wake(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, timeout: float | None) -> PendingCall:
    """Send a wake to all workers."""
    chosen = _tags(worker_group, role, tags, "wake")
    marks = worker_group.sleepers.seen(role, chosen)
    call = _start(worker_group, WAKE, f"wake of {role}", arguments(worker_group, role, chosen), timeout)
    call._then(partial(note, worker_group, marks))
    return call


def _tags(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, what: str) -> list[str]:
    if not isinstance(role, str):
        raise ConfigError(
            f"group.{what}({role!r}): it takes the name of one role, as in "
            f"group.{what}({next(iter(worker_group.roles))!r})"
        )
    if role not in worker_group.roles:
        raise ConfigError(
            f"group.{what}({role!r}): group {worker_group.name!r} has no such role: it has "
            f"{', '.join(worker_group.roles)}"
            f"{did_you_mean(role, worker_group.roles)}"
        )
    if isinstance(tags, str):
        raise ConfigError(f"group.{what}(tags={tags!r}) is a string; write tags=({tags!r},)")
    for tag in tags or ():
        if tag not in TAGS:
            raise ConfigError(f"group.{what}(tags) names {tag!r}; a role's memory is of {', '.join(TAGS)}")
    return list(TAGS if tags is None else tags)


def _discarded(tags: Sequence[str], discard: Sequence[str]) -> list[str]:
    if isinstance(discard, str):
        raise ConfigError(f"group.sleep(discard={discard!r}) is a string; write discard=({discard!r},)")
    for tag in discard:
        if tag not in DISCARDABLE:
            raise ConfigError(f"group.sleep(discard) names {tag!r}; what can be discarded is {', '.join(DISCARDABLE)}")
        if tag not in tags:
            raise ConfigError(f"group.sleep(discard) names {tag!r}, which tags={tuple(tags)!r} leaves awake")
    return list(discard)


def _start(
    worker_group: WorkerGroup, method: str, label: str, given: Mapping[str, Any], timeout: float | None
) -> PendingCall:
    if (recorder := recording(worker_group)) is not None:
        recorder.refuse_call(f"the {label}")
    worker_group.check()
    refuse_inside(f"the {label}", worker_group.name)
    info, spec = everyone(worker_group), SPECS[method]
    planned = plan(spec.dispatch, dict(given), info.ranks)
    call = PendingCall(label, "", method, info.slots)
    return start(ready(worker_group, call, info, spec, planned, [], FOREVER_S if timeout is None else timeout))


def _result(worker_group: WorkerGroup, role: str, call: PendingCall, done: str) -> int:
    """The bytes that were moved on all ranks.

    Raises:
        ColocateError: A rank could not do it, so that none has.
    """
    told = outcomes(call)
    refusal = next((each for each in told if each.own), None)
    if refusal is None:
        return sum(each.nbytes for each in told)
    text = f"role {role!r} of group {worker_group.name!r} could not be {done}"
    if left := [each.left for each in told if each.left is not None]:
        text += f": {refusal.refusal}. It isn't as it was: {'; '.join(left)}"
    else:
        text += f", and is as it was: {refusal.refusal}"
    kind = RoleError if refusal.fits else MemoryBudgetError
    raise kind(text, group=worker_group.name, role=role, remote_traceback=refusal.trace)
