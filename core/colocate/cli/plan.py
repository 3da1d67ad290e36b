"""`colocate plan`: what the roles of a config will hold, before anything of it is built."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from rich.text import Text

from colocate._job.planning import KINDS, GroupPlan, RolePlan, Turns, plan
from colocate._job.screen import console, show_table
from colocate._plugins.entry_points import listed
from colocate._system.numbers import plural
from colocate._system.sizes import size_text
from colocate.cli.output import guarded, load, print_json


def show_memory(
    file: Path, executor: str | None, changes: Iterable[str], *, json: bool, allow_import: bool = True
) -> int:
    """Show what roles will hold; exit status 1 when one can't fit into what it may have, or isn't known."""

    def command() -> int:
        # Before torch is imported: of groups whose ranks aren't there it has warnings.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        config = load(file, executor, changes, allow_import=allow_import)
        # What constructors print must not get between a script and the JSON it waits for.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            groups = plan(config)
        if json:
            print_json([_plain(group) for group in groups])
        else:
            _say(f"{config.name}: what roles will hold (torch took no memory for it, and nothing was started)")
            for group in groups:
                _show(group)
        return 1 if any(_is_unfit(group) for group in groups) else 0

    return guarded(command, as_json=json)


def _is_unfit(group: GroupPlan) -> bool:
    """Whether a role can't fit, or isn't known."""
    unknown = any(role.unknown is not None for role in group.roles)
    return unknown or any(turns.misfits for turns in group.turns()) or any(True for _ in group.misfits())


def _plain(group: GroupPlan) -> dict[str, Any]:
    return {
        "group": group.group,
        "roles": [{**attrs.asdict(role), "total": role.total} for role in group.roles],
        "fused": {"processes": group.slots, "fullest": group.fused},
        "separate": {"processes": group.processes, "all": group.separate},
        "budgets": [attrs.asdict(turns) for turns in group.turns()],
        "misfits": [{"role": role.role, **attrs.asdict(limit)} for role, limit in group.misfits()],
    }


def _show(group: GroupPlan) -> None:
    kinds = [kind for kind in KINDS if any(kind in role.kinds for role in group.roles)]
    rows = [_row(role, group, kinds) for role in group.roles]
    show_table(f"group {group.group}: each rank of a role", rows, console())
    for role in group.roles:
        if role.unknown is not None:
            _say(f"{role.role} isn't known: {role.unknown}")
    fused, separate = plural(group.slots, "worker"), plural(group.processes, "process")
    least = _at_least(group, range(group.slots))
    if least and not group.fused:
        _say(f"\nfused: {fused}; nothing is known of what they hold")
    else:
        _say(f"\nfused: {fused}, and the fullest holds {least}{size_text(group.fused)}")
    holds, in_all, each = ("holds", "", "") if group.processes == 1 else ("hold", " in all", "each ")
    hold = f", which {holds} {least}{size_text(group.separate)}{in_all}" if group.separate or not least else ""
    _say(f"separate: {separate}{hold}, {each}with its own Python, torch and, on a GPU, context")
    for turns in group.turns():
        _say(_of(turns, group))
    for role, limit in group.misfits():
        free = group.budgets.activations.get(role.role, 0) if limit.device else 0
        held = f"{size_text(role.total)}, {size_text(free)} are to stay free" if free else size_text(role.total)
        _say(f"{role.role} can't fit: it has {held}, and may have {size_text(limit.nbytes)}")


def _alone(role: RolePlan, group: GroupPlan) -> str:
    """Why a role doesn't fit where nobody else is awake."""
    has = [size_text(role.total)]
    if role.shared:
        has.append(f"{size_text(role.shared)} of other roles' that it shares")
    if free := group.budgets.activations.get(role.role, 0):
        has.append(f"{size_text(free)} to stay free")
    return f"{role.role} can't fit alone, with {listed(has)}"


def _row(role: RolePlan, group: GroupPlan, kinds: Iterable[str]) -> dict[str, str]:
    where = "all" if len(role.slots) == group.slots else ", ".join(map(str, role.slots))
    sizes = {kind: size_text(role.kinds[kind]) if kind in role.kinds else "" for kind in kinds}
    total = size_text(role.total)
    if role.unknown is not None:
        total = f"at least {total}" if role.total else "?"
    shared = (
        {"shared": size_text(role.shared) if role.shared else ""} if any(each.shared for each in group.roles) else {}
    )
    return {"role": role.role, "slots": where, **sizes, "total": total, **shared}


def _at_least(group: GroupPlan, slots: Iterable[int]) -> str:
    """Words before a sum to which a role of these slots adds what isn't known."""
    return "at least " if any(role.unknown is not None for slot in slots for role in group.on(slot)) else ""


def _of(turns: Turns, group: GroupPlan) -> str:
    """What a budget means, in a line."""
    limit = turns.limit
    where = "" if len(turns.slots) == group.slots else f", on slot {', '.join(map(str, turns.slots))}"
    begin = f"{limit.owner} may have {size_text(limit.nbytes)} of {limit.word}{where}"
    needs = f"{(least := _at_least(group, turns.slots))}{size_text(turns.needs)}"
    needs += f", with {size_text(turns.free)} to stay free" if turns.free else ""
    if turns.misfits and not limit.device:
        return f"{begin}, also for what sleeps: {listed(turns.misfits)} can't fit ({needs})"
    if turns.misfits:
        return f"{begin}: {'; '.join(_alone(role, group) for role in group.roles if role.role in turns.misfits)}"
    holders = [role.role for role in group.on(turns.slots[0]) if role.total or role.role in turns.takers]
    if least and not holders:
        return f"{begin}: nothing is known of what its roles hold"
    if not turns.takers:
        who = "the roles that are known" if least else "all roles"
        return f"{begin}: {who} fit together ({needs})"
    who = listed(turns.takers) if turns.apart else f"not all of {listed(holders)} can be awake together, so they"
    text = f"{begin}, and they need {needs}: {who} must take turns"
    if not group.budgets.swap:
        return f"{text}; say residency: swap"
    return text if turns.copies is None else f"{text}, and a step copies at most {size_text(turns.copies)}"


def _say(text: str) -> None:
    console().print(Text(text), soft_wrap=True)
