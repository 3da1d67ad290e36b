"""Implements `group.sleep` and `group.wake` as ordinary calls that either all workers carry out or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from colocate._calls.pending import PendingCall
from colocate._calls.sending import (
    Draft,
    assign_lane,
    for_all,
    make_group_role,
    on_call_settled,
    refuse_here,
    send_blocking,
)
from colocate._plugins.needs import require
from colocate._role.method import DISCARDABLE, TAGS
from colocate._signals.in_framework import check_may_wait
from colocate._system.nearest import did_you_mean
from colocate._values.dispatch import plan_call
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ConfigError, MemoryBudgetError, RoleError
from colocate.executor import OwnProcess
from colocate.features.memory.marks import Mark, Sleepers, SleepMark
from colocate.features.memory.messages import SLEEP, WAKE
from colocate.features.memory.sleep import Outcome
from colocate.features.memory.worker import MemoryOfWorker

_ON_CALL = ("wake", "fail")


def sleep_role(
    worker_group: WorkerGroup,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> int:
    """Put memory of a role to sleep; see `ColocatedGroup.sleep`."""
    check_may_wait(f"the sleep of {role}")
    return _moved_bytes(
        worker_group, role, start_sleep(worker_group, role, tags, timeout, on_call, discard), "put to sleep"
    )


def start_sleep(
    worker_group: WorkerGroup,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> PendingCall:
    """Send a sleep call to all workers, and return the pending call."""
    require(type(worker_group.services.executor), OwnProcess, "have a role sleep (group.sleep)")
    chosen = _check_tags(worker_group, role, tags, "sleep")
    lost = _check_discard(chosen, discard)
    if on_call not in _ON_CALL:
        meant = did_you_mean(str(on_call), _ON_CALL)
        raise ConfigError(f"group.sleep(on_call={on_call!r}): it is 'wake' or 'fail'{meant}")
    until_woken = on_call == "fail"
    if until_woken and worker_group.declared.budgets.swap:
        raise ConfigError(
            f"group.sleep(on_call='fail'): roles of group {worker_group.name!r} take turns (residency='swap'), and "
            "wake for their calls"
        )
    mark = partial(_get_sleepers(worker_group).add_marks, role, chosen, until_woken)
    mark()
    worker_group.home.on_groups_changed()
    parameters = {**_call_arguments(role, chosen), "discard": lost}
    call = _start_call(worker_group, SLEEP, f"sleep of {role}", parameters, timeout)
    mark()  # Renew the marks after sending the sleep, so that a wake sent before can't remove the marks.
    return call


def wake_role(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, timeout: float | None) -> int:
    """Wake memory of a role; see `ColocatedGroup.wake`."""
    check_may_wait(f"the wake of {role}")
    return _moved_bytes(worker_group, role, start_wake(worker_group, role, tags, timeout), "woken")


def start_wake(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, timeout: float | None) -> PendingCall:
    """Send a wake call to all workers, and return the pending call."""
    chosen = _check_tags(worker_group, role, tags, "wake")
    sleepers = _get_sleepers(worker_group)
    marks = sleepers.role_marks(role, chosen)
    call = _start_call(worker_group, WAKE, f"wake of {role}", _call_arguments(role, chosen), timeout)
    call._add_callback(partial(update_marks, sleepers, marks))
    return call


def _check_tags(worker_group: WorkerGroup, role: str, tags: Sequence[str] | None, what: str) -> list[str]:
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


def _check_discard(tags: Sequence[str], discard: Sequence[str]) -> list[str]:
    if isinstance(discard, str):
        raise ConfigError(f"group.sleep(discard={discard!r}) is a string; write discard=({discard!r},)")
    for tag in discard:
        if tag not in DISCARDABLE:
            raise ConfigError(f"group.sleep(discard) names {tag!r}; what can be discarded is {', '.join(DISCARDABLE)}")
        if tag not in tags:
            raise ConfigError(f"group.sleep(discard) names {tag!r}, which tags={tuple(tags)!r} leaves awake")
    return list(discard)


def _start_call(
    worker_group: WorkerGroup, method: str, label: str, given: Mapping[str, Any], timeout: float | None
) -> PendingCall:
    refuse_here(worker_group, f"the {label}")
    return send_blocking(for_all(worker_group, label, method, MemoryOfWorker.calls[method], given, timeout))


def _moved_bytes(worker_group: WorkerGroup, role: str, call: PendingCall, done: str) -> int:
    """Return the number of bytes that all ranks have moved.

    Raises:
        ColocateError: A rank refused, so no rank has moved memory.
    """
    outcomes = _read_outcomes(call)
    refusal = next((outcome for outcome in outcomes if outcome.refused_here), None)
    if refusal is None:
        return sum(outcome.nbytes for outcome in outcomes)
    text = f"role {role!r} of group {worker_group.name!r} could not be {done}"
    if problems := [outcome.residue for outcome in outcomes if outcome.residue is not None]:
        text += f": {refusal.refusal}. It isn't as it was: {'; '.join(problems)}"
    else:
        text += f", and is as it was: {refusal.refusal}"
    kind = RoleError if refusal.fits else MemoryBudgetError
    raise kind(text, group=worker_group.name, role=role, remote_traceback=refusal.trace)


# -- before calls


def prepend_wakes(worker_group: WorkerGroup, sleepers: Sleepers, drafts: Sequence[Draft]) -> Sequence[Draft]:
    """Insert a wake call before each call that needs memory that may be asleep, and return all calls in order."""
    result: list[Draft] = []
    waking: dict[Mark, Draft] = {}
    for draft in drafts:
        for role, tags in _needed_memory(draft).items():
            role_marks = sleepers.call_marks(role, tags)
            if marks := {mark: slept for mark, slept in role_marks.items() if mark not in waking}:
                result.append(_draft_wake(worker_group, sleepers, role, marks, draft))
                waking.update(dict.fromkeys(marks, result[-1]))
            for mark in role_marks:  # A wake for several calls gets the longest of the calls' timeouts.
                waking[mark].timeout = max(waking[mark].timeout, draft.timeout)
        result.append(draft)
    return result if waking else drafts


def update_marks(sleepers: Sleepers, marks: Mapping[Mark, SleepMark], call: PendingCall) -> None:
    """Remove a role's sleep marks after a successful wake, so that later calls need no further wake.

    If the outcome can't be read, the call after the wake reports the error.
    """
    if call.peek_error() is None and all(outcome.refusal is None for outcome in _read_outcomes(call)):
        sleepers.remove_marks(dict(marks))


def _needed_memory(draft: Draft) -> Mapping[str, Sequence[str]]:
    role, spec = draft.call.role, draft.call.spec
    if draft.wakes is not None or spec is None or role not in draft.worker_group.roles:
        return draft.wakes or {}
    return {role: TAGS if spec.awake is None else spec.awake}


def _call_arguments(role: str, tags: Sequence[str], why: str = "asked for") -> dict[str, Any]:
    return {"role": role, "tags": list(tags), "why": why}


def _read_outcomes(call: PendingCall) -> Sequence[Outcome]:
    outcomes: Sequence[Outcome] = call.result()
    return outcomes


def _get_sleepers(worker_group: WorkerGroup) -> Sleepers:
    return cast("Sleepers", cast("Any", worker_group.get_part("memory")).sleepers)


def _draft_wake(
    worker_group: WorkerGroup, sleepers: Sleepers, role: str, marks: Mapping[Mark, SleepMark], before: Draft
) -> Draft:
    info, spec, label = make_group_role(worker_group), MemoryOfWorker.calls[WAKE], f"wake of {role}"
    parameters = _call_arguments(role, [tag for _, tag in marks], f"needed by {before.call.label}")
    planned = plan_call(spec.dispatch, parameters, info.ranks)
    call = PendingCall(label, "", WAKE, info.slots)
    call.at, call.submitted = before.call.at, before.call.submitted
    call.link, call.info, call.spec = worker_group, info, spec
    assign_lane(worker_group, call)
    call.on_end = partial(on_call_settled, worker_group)
    call._add_callback(partial(update_marks, sleepers, marks))
    body = worker_group.services.executor.codec.pack_arguments(dict(planned.arguments[0]), label)
    return Draft(worker_group, call, [body] * len(info.slots), planned.valid, before.timeout)
