"""`group.sleep` and `group.wake`: calls in the group's order like any other, which all workers do or none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from colocate._calls.pending import PendingCall
from colocate._crew.crew import Crew
from colocate._role.method import DISCARDABLE, TAGS
from colocate._signals.at_work import refuse_to_wait
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import FOREVER_S
from colocate._values.dispatch import plan
from colocate._views.sending import arguments, everyone, note, outcomes, ready, recording, refuse_inside, start
from colocate.errors import ConfigError, MemoryBudgetError, RoleError
from colocate.worker.serving.functions import SLEEP, SPECS, WAKE

_ON_CALL = ("wake", "fail")


def sleep(
    crew: Crew,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> int:
    """Put memory of a role to sleep; see `ColocatedGroup.sleep`."""
    refuse_to_wait(f"the sleep of {role}")
    return _result(crew, role, start_sleep(crew, role, tags, timeout, on_call, discard), "put to sleep")


def start_sleep(
    crew: Crew,
    role: str,
    tags: Sequence[str] | None,
    timeout: float | None,
    on_call: str = "wake",
    discard: Sequence[str] = (),
) -> PendingCall:
    """Send a sleep to all workers."""
    chosen = _tags(crew, role, tags, "sleep")
    lost = _discarded(chosen, discard)
    if on_call not in _ON_CALL:
        meant = did_you_mean(str(on_call), _ON_CALL)
        raise ConfigError(f"group.sleep(on_call={on_call!r}): it is 'wake' or 'fail'{meant}")
    until_woken = on_call == "fail"
    if until_woken and crew.declared.budgets.swap:
        raise ConfigError(
            f"group.sleep(on_call='fail'): roles of group {crew.name!r} take turns (residency='swap'), and wake for "
            "their calls"
        )
    crew.sleepers.mark(role, chosen, until_woken)
    crew.home.changed()
    given = {**arguments(crew, role, chosen), "discard": lost}
    call = _start(crew, SLEEP, f"sleep of {role}", given, timeout)
    crew.sleepers.mark(role, chosen, until_woken)  # what has woken it before that doesn't count
    return call


def wake(crew: Crew, role: str, tags: Sequence[str] | None, timeout: float | None) -> int:
    """Wake memory of a role; see `ColocatedGroup.wake`."""
    refuse_to_wait(f"the wake of {role}")
    return _result(crew, role, start_wake(crew, role, tags, timeout), "woken")


def start_wake(crew: Crew, role: str, tags: Sequence[str] | None, timeout: float | None) -> PendingCall:
    """Send a wake to all workers."""
    chosen = _tags(crew, role, tags, "wake")
    marks = crew.sleepers.seen(role, chosen)
    call = _start(crew, WAKE, f"wake of {role}", arguments(crew, role, chosen), timeout)
    call._then(partial(note, crew, marks))
    return call


def _tags(crew: Crew, role: str, tags: Sequence[str] | None, what: str) -> list[str]:
    if not isinstance(role, str):
        raise ConfigError(
            f"group.{what}({role!r}): it takes the name of one role, as in group.{what}({next(iter(crew.roles))!r})"
        )
    if role not in crew.roles:
        raise ConfigError(
            f"group.{what}({role!r}): group {crew.name!r} has no such role: it has {', '.join(crew.roles)}"
            f"{did_you_mean(role, crew.roles)}"
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


def _start(crew: Crew, method: str, label: str, given: Mapping[str, Any], timeout: float | None) -> PendingCall:
    if (pipeline := recording(crew)) is not None:
        pipeline.refuse_call(f"the {label}")
    crew.check()
    refuse_inside(f"the {label}", crew.name)
    info, spec = everyone(crew), SPECS[method]
    planned = plan(spec.dispatch, dict(given), info.ranks)
    call = PendingCall(label, "", method, info.slots)
    return start(ready(crew, call, info, spec, planned, [], FOREVER_S if timeout is None else timeout))


def _result(crew: Crew, role: str, call: PendingCall, done: str) -> int:
    """The bytes that were moved on all ranks.

    Raises:
        ColocateError: A rank could not do it, so that none has.
    """
    told = outcomes(call)
    refusal = next((each for each in told if each.own), None)
    if refusal is None:
        return sum(each.nbytes for each in told)
    text = f"role {role!r} of group {crew.name!r} could not be {done}"
    if left := [each.left for each in told if each.left is not None]:
        text += f": {refusal.refusal}. It isn't as it was: {'; '.join(left)}"
    else:
        text += f", and is as it was: {refusal.refusal}"
    kind = RoleError if refusal.fits else MemoryBudgetError
    raise kind(text, group=crew.name, role=role, remote_traceback=refusal.trace)
