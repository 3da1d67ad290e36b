"""`colocate top`: what a running job's roles do and hold, as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from colocate._api.glance import RECENT_S
from colocate._job.cluster_window import look_at
from colocate._job.screen import console, show_table
from colocate._job.window import Job, jobs, look
from colocate._system.nearest import did_you_mean
from colocate._system.off_main import off_main
from colocate._system.sizes import size_text
from colocate.cli.cluster import Cluster
from colocate.cli.output import guarded, print_json
from colocate.errors import ConfigError, EngineError
from colocate.executor import Watchable, Window

_NUMBERS = ("holds", "asleep", "busy", "queue", "for")


@attrs.frozen
class Sight:
    """A job that can be looked at.

    Attributes:
        name: Its name.
        ids: What else it may be called by; the first is its alone.
        look: What its groups do just now; None where it has ended, or is another user's.
    """

    name: str
    ids: tuple[str, ...]
    look: Callable[[], Mapping[str, Any] | None]

    def __str__(self) -> str:
        return f"{self.name} ({self.ids[0]})"


def show_top(name: str | None, cluster: Cluster, *, once: bool, every: float, json: bool) -> int:
    """Show a job, again and again until it ends or somebody has seen enough."""

    def command() -> int:
        if not cluster.given:
            _show(_chosen(name, [_here(job) for job in jobs()], "on this machine"), once, every, json)
            return 0
        call = " ".join(filter(None, ("top", name)))
        with cluster.joined(call, "jobs but its driver's, which `colocate top` shows on its machine") as runtime:
            runtime._node.require(Watchable, "say which jobs run on its cluster")
            executor = cast("Watchable", runtime._node.services.executor)
            found = [_there(window, executor) for window in off_main(executor.windows)]
            _show(_chosen(name, found, "on this cluster"), once, every, json)
        return 0

    return guarded(command, as_json=json)


def _here(job: Job) -> Sight:
    return Sight(job.name, (job.id, str(job.pid)), partial(look, job))


def _there(window: Window, executor: Watchable) -> Sight:
    def seen() -> Mapping[str, Any] | None:
        try:
            return look_at(window, executor)
        except EngineError:
            if any(window.id == each.id for each in executor.windows()):
                raise
            return None  # it has ended

    return Sight(window.name, (window.id, window.id.split("/")[1]), partial(off_main, seen))


def _chosen(name: str | None, found: Sequence[Sight], where: str) -> Sight:
    """The job that is meant: by its name, or its driver's process, or the only one."""
    matching = [each for each in found if name is None or name == each.name or name in each.ids]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(map(str, found))
    if not found:
        raise ConfigError(f"no job runs {where}: `colocate run FILE` starts one")
    if matching:
        raise ConfigError(f"which job? These run {where}: {there}. Say its number: colocate top {matching[0].ids[0]}")
    raise ConfigError(f"no job is called {name!r}: there is {there}{did_you_mean(name or '', [e.name for e in found])}")


def _show(sight: Sight, once: bool, every: float, json: bool) -> None:
    told = sight.look()
    if told is None:
        raise ConfigError(f"job {sight} has just ended, or is another user's")
    if json:
        print_json(told)
    elif once or not console().is_terminal:
        console().print(Text(_title(told), "bold"), soft_wrap=True)
        show_table("", [dict(row) for row in rows(told)], console())
    else:
        _watch(sight, told, every)


def _watch(sight: Sight, told: Mapping[str, Any] | None, every: float) -> None:
    try:
        with Live(console=console(), screen=False, auto_refresh=False) as live:
            while told is not None:
                live.update(_page(told), refresh=True)
                time.sleep(every)
                told = sight.look()
    except KeyboardInterrupt:
        return
    console().print(Text(f"{sight.name} has ended"))


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
    where = f"process {told['pid']} on {told['node']}"
    return f"{told['job']} ({where}), {told['seconds']:.0f} s; busy: of the last {RECENT_S:.0f} s"


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
