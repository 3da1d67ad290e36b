"""`colocate plan`: what the roles of a config will hold, before anything of it is built."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import attrs
from rich.text import Text

from colocate.texts import listed, plural, size_text
from colocate_run.cli.output import guarded, load, print_json
from colocate_run.planning import KINDS, Fit, GroupPlan, plan
from colocate_run.screen import console, show_table


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
            print_json(
                [
                    {
                        "group": group.group,
                        "roles": [{**attrs.asdict(role), "total": role.total} for role in group.roles],
                        "budgets": [attrs.asdict(fit) for fit in group.fits()],
                    }
                    for group in groups
                ]
            )
        else:
            _say(f"{config.name}: what roles will hold (torch took no memory for it, and nothing was started)")
            for group in groups:
                _show(group)
        unknown = any(role.unknown is not None for group in groups for role in group.roles)
        return 1 if unknown or any(fit.misfits for group in groups for fit in group.fits()) else 0

    return guarded(command, as_json=json)


def _show(group: GroupPlan) -> None:
    kinds = [kind for kind in KINDS if any(kind in role.kinds for role in group.roles)]
    rows = []
    for role in group.roles:
        total = size_text(role.total)
        if role.unknown is not None:
            total = f"at least {total}" if role.total else "?"
        sizes = {kind: size_text(role.kinds[kind]) if kind in role.kinds else "" for kind in kinds}
        where = "all" if len(role.slots) == group.slots else ", ".join(map(str, role.slots))
        rows.append({"role": role.role, "slots": where, **sizes, "total": total})
    show_table(f"group {group.group}: each rank of a role", rows, console())
    for role in group.roles:
        if role.unknown is not None:
            _say(f"{role.role} isn't known: {role.unknown}")
    fullest = max(sum(role.total for role in group.on(slot)) for slot in range(group.slots))
    fused, least = plural(group.slots, "worker"), _at_least(group, range(group.slots))
    _say(f"\nfused: {fused}, and the fullest holds {least}{size_text(fullest)}")
    processes = sum(len(role.slots) for role in group.roles)
    separate = size_text(sum(role.alone * len(role.slots) for role in group.roles))
    holds, in_all, each = ("holds", "", "") if processes == 1 else ("hold", " in all", "each ")
    own = f"{each}with its own Python, torch and, on a GPU, context"
    _say(f"separate: {plural(processes, 'process')}, which {holds} {least}{separate}{in_all}, {own}")
    for fit in group.fits():
        _say(_of(fit, group))


def _at_least(group: GroupPlan, slots: Iterable[int]) -> str:
    """Return the words before a sum to which a role of these slots adds what isn't known."""
    return "at least " if any(role.unknown is not None for slot in slots for role in group.on(slot)) else ""


def _of(fit: Fit, group: GroupPlan) -> str:
    """Return what a budget means, in a line."""
    limit, least = fit.limit, _at_least(group, fit.slots)
    where = "" if len(fit.slots) == group.slots else f", on slot {', '.join(map(str, fit.slots))}"
    text = f"{limit.owner} may have {size_text(limit.nbytes)} of {limit.word}{where}"
    needs = f"{least}{size_text(fit.needs)}" + (f", with {size_text(fit.free)} to stay free" if fit.free else "")
    if fit.misfits:
        sleeping = "" if limit.device else ", also for what sleeps"
        return f"{text}{sleeping}: {listed(fit.misfits)} can't fit (they need {needs})"
    if not fit.takers:
        return f"{text}: {'the roles that are known' if least else 'all roles'} fit together ({needs})"
    text = f"{text}, and they need {needs}: {listed(fit.takers)} must take turns"
    return text if group.budgets.swap else f"{text}; say residency: swap"


def _say(text: str) -> None:
    console().print(Text(text), soft_wrap=True)
