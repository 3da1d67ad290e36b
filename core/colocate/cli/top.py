"""`colocate top`: what a running job's roles do and hold, as it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from colocate._api.glance import RECENT_S
from colocate._job.screen import console, show_table
from colocate._job.window import Job, jobs, look
from colocate._system.nearest import did_you_mean
from colocate._system.sizes import size_text
from colocate.cli.output import guarded, print_json
from colocate.errors import ConfigError

_NUMBERS = ("holds", "asleep", "busy", "queue", "for")


def show_top(name: str | None, *, once: bool, every: float, json: bool) -> int:
    """Show a job, again and again until it ends or somebody has seen enough."""

    def command() -> int:
        job = _chosen(name)
        if json:
            print_json(_seen(job))
        elif once or not console().is_terminal:
            told = _seen(job)
            console().print(Text(_title(told), "bold"), soft_wrap=True)
            show_table("", [dict(row) for row in rows(told)], console())
        else:
            _watch(job, every)
        return 0

    return guarded(command, as_json=json)


def _chosen(name: str | None) -> Job:
    """The job that is meant: by its name, or its driver's process, or the only one."""
    found = jobs()
    matching = [job for job in found if name in (None, job.name, str(job.pid), f"{job.pid}/{job.number}")]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(f"{job.name} ({job.pid}/{job.number})" for job in found)
    if not found:
        raise ConfigError("no job runs on this machine: `colocate run FILE` starts one")
    if matching:
        raise ConfigError(
            f"which job? These run here: {there}. Say its number: colocate top {matching[0].pid}/{matching[0].number}"
        )
    raise ConfigError(
        f"no job is called {name!r}: there is {there}{did_you_mean(name or '', [job.name for job in found])}"
    )


def _seen(job: Job) -> dict[str, Any]:
    told = look(job)
    if told is None:
        raise ConfigError(f"job {job.name!r} (process {job.pid}) has just ended, or is another user's")
    return told


def _watch(job: Job, every: float) -> None:
    try:
        with Live(console=console(), screen=False, auto_refresh=False) as live:
            while (told := look(job)) is not None:
                live.update(_page(told), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return
    console().print(Text(f"{job.name} has ended"))


def _page(told: Mapping[str, Any]) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found = list(rows(told))
    for name in found[0] if found else ():
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    for row in found:
        table.add_row(*(Text(str(cell)) for cell in row.values()))
    troubles = [Text(group["memory"], "yellow") for group in told["groups"] if "memory" in group]
    return Group(Text(_title(told), "bold"), table, *troubles)


def _title(told: Mapping[str, Any]) -> str:
    return f"{told['job']} (process {told['pid']}), {told['seconds']:.0f} s; busy: of the last {RECENT_S:.0f} s"


def rows(told: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """A row for each role of each slot; what the slot itself does is in its first one."""
    for group in told["groups"]:
        for slot in group["slots"]:
            first = True
            for role in slot["roles"]:
                yield {
                    "group": f"{group['group']} ({group['state']})" if first and slot["slot"] == 0 else "",
                    "slot": f"{slot['slot']} {slot['node']} {slot['device']}" if first else "",
                    "role": role["role"],
                    "holds": "" if role["bytes"] is None else size_text(role["bytes"]),
                    "asleep": size_text(role["asleep"]) if role["asleep"] else "",
                    "busy": f"{role['busy']:.0%}",
                    "queue": str(slot["queue"]) if first else "",
                    "runs": (slot["call"] or "") if first else "",
                    "for": f"{slot['age']:.1f} s" if first and slot["age"] is not None else "",
                }
                first = False
