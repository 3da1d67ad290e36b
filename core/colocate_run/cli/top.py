"""`colocate top`: show calls and memory of a running job's roles, live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
from rich.console import Group
from rich.live import Live
from rich.text import Text

from colocate.driver import RECENT_S, Driver, run_deferred
from colocate.errors import ClusterError, ConfigError
from colocate.executor import Detachable, Executor, Watchable, Window
from colocate.texts import did_you_mean, format_count, format_size
from colocate_report.jobs import Job, list_jobs, matches_job
from colocate_report.window import inspect_cluster_job, inspect_job
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.output import print_json, report_errors
from colocate_run.screen import console, fit_table, show_table

_ON_THIS_MACHINE = "on this machine"
# A narrow terminal drops columns in this order, so that a role's memory and a slot's running call stay longest.
_SPARE = ("node", "device", "queue", "idle for", "asleep", "busy", "for", "holds")


@attrs.frozen
class JobView:
    """A job or a detached pool that `colocate top` can show."""

    name: str
    ids: tuple[str, ...]  # The job's id, which is unique, then other names.
    # Returns the current state; None if the job has ended or is another user's.
    read_status: Callable[[], Mapping[str, Any] | None]

    def __str__(self) -> str:
        return f"{self.name} ({self.ids[0]})"


@report_errors
def show_top(name: str | None, cluster: Cluster, *, once: bool, every: float, json: bool) -> int:
    """Show a job until the job ends or the user interrupts."""
    try:
        _show_job(name, cluster, once, every, json)
    except KeyboardInterrupt:
        return 0
    except TimeoutError as error:
        raise ClusterError(str(error)) from error
    return 0


def _show_job(name: str | None, cluster: Cluster, once: bool, every: float, json: bool) -> None:
    if not cluster.is_given:
        if not once and not json and console().is_terminal:
            if not list_jobs():
                console().print("no job runs on this machine yet; waiting for one that starts (Ctrl-C ends it)")
            while not list_jobs():  # A job that is still starting can't be shown yet.
                time.sleep(every)
        _show_view(_choose_view(name, [_local_view(job) for job in list_jobs()], _ON_THIS_MACHINE), once, every, json)
        return
    call = " ".join(filter(None, ("top", name)))
    with cluster.connect(call, "jobs besides its driver's, which `colocate top` shows on that machine") as runtime:
        driver = Driver(runtime)
        driver.require(Watchable, "say which jobs run on its cluster")
        executor = driver.executor
        sights = [_cluster_view(window, executor) for window in run_deferred(cast("Watchable", executor).windows)]
        if isinstance(executor, Detachable):
            sights += [_pool_view(str(pool["name"]), executor) for pool in run_deferred(executor.list_pools)]
        _show_view(_choose_view(name, sights, "on this cluster"), once, every, json)


def _local_view(job: Job) -> JobView:
    return JobView(job.name, (job.id, str(job.pid)), partial(inspect_job, job))


def find_job(name: str | None) -> Job:
    """Return the job on this machine with the given name, id or process number."""
    running = list_jobs()
    sight = _choose_view(name, [_local_view(job) for job in running], _ON_THIS_MACHINE)
    return next(job for job in running if job.id == sight.ids[0])


def _cluster_view(window: Window, executor: Executor) -> JobView:
    watchable = cast("Watchable", executor)

    def seen() -> Mapping[str, Any] | None:
        try:
            return inspect_cluster_job(window, watchable)
        except ClusterError:
            if any(window.id == other.id for other in watchable.windows()):
                raise
            return None  # The job has ended.

    return JobView(window.name, (window.id, window.id.split("/")[1]), partial(run_deferred, seen))


def _pool_view(name: str, executor: Detachable) -> JobView:
    def seen() -> Mapping[str, Any] | None:
        try:
            return _pool_to_job(executor.inspect_pool(name))
        except (ConfigError, ClusterError):
            if any(name == other["name"] for other in executor.list_pools()):
                raise
            return None  # The pool has ended.

    return JobView(name, (f"pool/{name}",), partial(run_deferred, seen))


def _pool_to_job(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a detached pool's state to the form of a job's state, with each group's workers as slots."""
    groups: dict[str, dict[str, Any]] = {}
    state = "detached" if pool["driver"] is None else "attached"
    for name in pool["groups"]:
        groups[name] = {"group": name, "state": state, "slots": []}
    for worker in sorted(pool["workers"], key=lambda each: int(each["slot"])):
        group = groups.setdefault(worker["group"], {"group": worker["group"], "state": state, "slots": []})
        group["generation"] = worker["generation"]
        if "memory" in worker:
            group["memory"] = worker["memory"]
        group["slots"].append({key: value for key, value in worker.items() if key not in ("group", "generation")})
    return {**{key: value for key, value in pool.items() if key != "workers"}, "groups": list(groups.values())}


def _choose_view(name: str | None, found: Sequence[JobView], where: str) -> JobView:
    """Return the job with the given name, id or process number; without a name, the only job."""
    matching = [sight for sight in found if name is None or name in sight.ids or matches_job(sight.name, name)]
    if len(matching) == 1:
        return matching[0]
    listing = ", ".join(map(str, found))
    if not found:
        on_cluster = "no job runs on this cluster, and no pool is detached"
        none = "no job runs on this machine, or the job is still starting" if where == _ON_THIS_MACHINE else on_cluster
        raise ConfigError(f"{none}: start one by `colocate run FILE`, or by colocate.record(...) in a script")
    if matching:
        raise ConfigError(f"which job? These run {where}: {listing}. Say its number: colocate top {matching[0].ids[0]}")
    raise ConfigError(
        f"no job is called {name!r}: there is {listing}{did_you_mean(name or '', [e.name for e in found])}"
    )


def _show_view(sight: JobView, once: bool, every: float, json: bool) -> None:
    answer = sight.read_status()
    if answer is None:
        raise ConfigError(f"job {sight} has just ended, or is another user's")
    if json:
        print_json(answer)
    elif once or not console().is_terminal:
        console().print(Text(_format_title(answer), "bold"), soft_wrap=True)
        show_table("", list(slot_rows(answer)), console(), spare=_SPARE)
        for trouble in _list_troubles(answer):
            console().print(Text(trouble, "yellow"), soft_wrap=True)
    else:
        _watch_view(sight, answer, every)


def _watch_view(sight: JobView, told: Mapping[str, Any] | None, every: float) -> None:
    try:
        with Live(console=console(), screen=False, auto_refresh=False) as live:
            while told is not None:
                live.update(_render_page(told, live.console.width), refresh=True)
                time.sleep(every)
                told = sight.read_status()
    except KeyboardInterrupt:
        return
    console().print(Text(f"{sight.name} has ended"))


def _render_page(told: Mapping[str, Any], width: int) -> Group:
    table = fit_table(list(slot_rows(told)), width, spare=_SPARE)
    return Group(
        Text(_format_title(told), "bold"), table, *(Text(trouble, "yellow") for trouble in _list_troubles(told))
    )


def _list_troubles(told: Mapping[str, Any]) -> list[str]:
    troubles = [group["memory"] for group in told["groups"] if "memory" in group]
    troubles += [f"worker {name} doesn't answer: it is stopped, or hangs" for name in told.get("silent", ())]
    if told.get("lost"):
        troubles.append(f"{format_count(told['lost'], 'slot')} can't be reached")
    return troubles


def _format_title(told: Mapping[str, Any]) -> str:
    if "pid" not in told:
        status = f"it lives {told['left_s']:.0f} s without a driver" if told["left_s"] is not None else told["driver"]
        return (
            f"{told['name']} (detached pool), {status or 'its lead does not answer'}; "
            f"busy: of the last {RECENT_S:.0f} s"
        )
    where = f"process {told['pid']} on {told['node']}"
    return f"{told['job']} ({where}), {told['seconds']:.0f} s; busy: of the last {RECENT_S:.0f} s"


def _format_idle(found: Mapping[str, float], stops: Sequence[str]) -> str:
    """Describe why a slot was mostly idle. If a rank is stopped, name that rank instead of the waiting call."""
    why, share = max(found.items(), key=lambda each: each[1], default=("", 0.0))
    if stops and why.startswith("the last ranks of "):
        why = f"the stop of {stops[0].partition(' is stopped')[0]}"
    return f"{why} {share:.0%}" if share >= 0.005 else ""


def _format_gpu(found: Mapping[str, Any]) -> str:
    use, memory, watts, celsius = (found.get(name) for name in ("use", "memory", "watts", "celsius"))
    parts = (
        None if use is None else f"{use:.0%}",
        None if memory is None else format_size(memory),
        None if watts is None else f"{watts:.0f} W",
        None if celsius is None else f"{celsius:.0f} °C",
    )
    return ", ".join(part for part in parts if part)


def slot_rows(told: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a row for each role of each slot; the slot's columns are filled in the first row."""
    gpus = any("gpu" in slot for group in told["groups"] for slot in group["slots"])
    behind = any(
        "weights_behind" in role for group in told["groups"] for slot in group["slots"] for role in slot["roles"]
    )
    idles = any(slot.get("idle") for group in told["groups"] for slot in group["slots"])
    for group in told["groups"]:
        stops = [slot["stopped"] for slot in group["slots"] if "stopped" in slot]
        for slot in group["slots"]:
            first = True
            runs = slot["call"] or ""
            if stops and runs:  # All other ranks wait for the stopped rank.
                runs += f": {slot['stopped']}" if "stopped" in slot else f" (while {stops[0].partition(' at ')[0]})"
            for role in slot["roles"]:
                yield {
                    "group": f"{group['group']} ({group['state']})" if first and slot is group["slots"][0] else "",
                    "slot": str(slot["slot"]) if first else "",
                    "node": slot["node"] if first else "",
                    "device": slot["device"] if first else "",
                    "role": role["role"],
                    "holds": "" if role["bytes"] is None else format_size(role["bytes"]),
                    "asleep": format_size(role["asleep"]) if role["asleep"] else "",
                    "busy": f"{role['busy']:.0%}",
                    **({"behind": str(role.get("weights_behind", ""))} if behind else {}),
                    **({"gpu": _format_gpu(slot.get("gpu", {})) if first else ""} if gpus else {}),
                    **({"idle for": _format_idle(slot.get("idle", {}), stops) if first else ""} if idles else {}),
                    "queue": str(slot["queue"]) if first else "",
                    "runs": runs if first else "",
                    "for": f"{slot['age']:.1f} s" if first and slot["age"] is not None else "",
                }
                first = False
