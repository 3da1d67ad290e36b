"""Calls whose role may sleep go behind one that wakes it: what is asked for by a call wakes by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from colocate._calls.joiner import Joiner
from colocate._calls.pending import PendingCall
from colocate._crew.crew import Crew
from colocate._crew.sleepers import Mark, Slept
from colocate._role.method import TAGS
from colocate._role.role import RoleInfo
from colocate._values.dispatch import plan
from colocate._values.mesh import Mesh
from colocate._views.drafts import Draft, Messages, settled
from colocate.worker.memory.sleeping import Outcome
from colocate.worker.serving.functions import SPECS, WAKE, Functions


def everyone(crew: Crew) -> RoleInfo:
    """The role that functions run in, on all slots. Workers know it by what its context needs."""
    slots = range(len(crew.workforce.workers))
    methods = {SPECS["run"].name: SPECS["run"]}
    key = len(slots), crew.services.seed
    return RoleInfo("", Functions, methods, slots, {"": Mesh({"dp": len(slots)})}, Functions.__module__, key=key)


def send(messages: Messages) -> Sequence[Draft]:
    """Send calls of one group, each behind those that wake what it needs; all of these. The order's lock is held."""
    drafts = messages.drafts
    if len(found := _behind_wakes(drafts)) == len(drafts):
        messages.send()
        return drafts
    together = Messages(found)
    try:
        together.send()
    finally:
        together.discard()
    return found


def _behind_wakes(drafts: Sequence[Draft]) -> Sequence[Draft]:
    crew = drafts[0].crew
    if not crew.sleepers:
        return drafts
    found: list[Draft] = []
    waking: dict[Mark, Draft] = {}
    for draft in drafts:
        for role, seen in _wakes(crew, draft).items():
            if marks := {mark: slept for mark, slept in seen.items() if mark not in waking}:
                found.append(_waking(crew, role, marks, draft))
                waking.update(dict.fromkeys(marks, found[-1]))
            for mark in seen:  # it has as long as who waits for it longest
                waking[mark].timeout = max(waking[mark].timeout, draft.timeout)
        found.append(draft)
    return found


def arguments(crew: Crew, role: str, tags: Sequence[str], why: str = "asked for") -> dict[str, Any]:
    """Those of a call that has a role sleep or wake, and what for."""
    beside = dict(Counter(crew.node(slot) for slot in crew.live()))
    return {"role": role, "tags": list(tags), "beside": beside, "why": why}


def note(crew: Crew, marks: Mapping[Mark, Slept], call: PendingCall) -> None:
    """A call that wakes a role is over: if it has, calls need no other one.

    That what it says can't be read here is for whoever reads the call that it goes before.
    """
    if call.exception() is None and all(outcome.refusal is None for outcome in outcomes(call)):
        crew.sleepers.woken(dict(marks))


def outcomes(call: PendingCall) -> Sequence[Outcome]:
    """What has become of a sleep or a wake, by slot."""
    found: Sequence[Outcome] = call.result()
    return found


def _wakes(crew: Crew, draft: Draft) -> dict[str, dict[Mark, Slept]]:
    """What a call wakes, by role."""
    name = draft.call.role
    if name not in crew.roles:
        return {}
    awake = draft.spec.awake
    return {name: crew.sleepers.for_call(name, TAGS if awake is None else awake)}


def _waking(crew: Crew, role: str, marks: Mapping[Mark, Slept], before: Draft) -> Draft:
    info, spec, label = everyone(crew), SPECS[WAKE], f"wake of {role}"
    given = arguments(crew, role, [tag for _, tag in marks], f"needed by {before.call.label}")
    planned = plan(spec.dispatch, given, info.ranks)
    call = PendingCall(label, "", WAKE, info.slots)
    call.at, call.submitted = before.call.at, before.call.submitted
    call.link = crew
    call._joiner = Joiner(crew, info, spec)
    call.on_end = partial(settled, crew)
    call._then(partial(note, crew, marks))
    body = crew.services.executor.codec.pack_arguments(dict(planned.arguments[0]), label)
    return Draft(crew, call, info, spec, [body] * len(info.slots), planned.valid, before.timeout)
