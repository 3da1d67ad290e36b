"""`colocate debug`: attach to the terminal of a stopped rank, or list the stopped ranks.

Modules that the prompt doesn't need are imported on demand, because a user waits for the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colocate import features
from colocate.errors import ColocateError, ConfigError
from colocate_report.jobs import list_jobs, matches_job


def debug_rank(job: str | None, rank: str | None, *, json: bool) -> int:
    """Attach this terminal to a stopped rank, or list the stopped ranks."""
    try:
        attachment = features.import_module_of("debugging.attach").attach(find_driver(job), rank)
        with contextlib.closing(attachment):
            if attachment.stopped_ranks is None:
                code: int = attachment.run_terminal()
                return code
            _print_stops(attachment.first, rank, json)
    except ColocateError as error:
        from colocate_run.cli.output import print_errors

        print_errors([error], as_json=json)
        return 1
    return 0


def _print_stops(told: Mapping[str, Any], rank: str | None, json: bool) -> None:
    from colocate_run.cli.output import print_json
    from colocate_run.screen import console, show_table

    stops, named, free = told["stops"], told["named"], told["free"]
    if rank is not None:
        stopped = ", ".join(map(_stop_name, stops)) or "none"
        reason = "several are called so" if free else "another terminal has it" if named else "none is called so"
        raise ConfigError(f"--rank {rank}: {reason}; stopped: {stopped}")
    if json:
        print_json({"stopped": stops})
    else:
        show_table("", list(_stop_rows(stops)), console())


def find_driver(job: str | None) -> int:
    """Return the process id of a job's driver, or of the only driver with stopped ranks if no job is named."""
    if job is not None and job.partition("/")[0].isdigit():
        return int(job.partition("/")[0])
    if job is None:
        matching: list[int] = features.import_module_of("debugging.attach").list_stopped_drivers()
    else:
        matching = sorted({entry.pid for entry in list_jobs() if matches_job(entry.name, job)})
        if not matching:
            raise ConfigError(f"no job is called {job!r} on this machine: `colocate debug` without a name finds any")
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ConfigError("no rank of any run on this machine is stopped: breakpoint() in a role, or --debug, does so")
    names = {entry.pid: entry.name for entry in list_jobs()}
    candidates = ", ".join(f"{names.get(entry, 'a script')} ({entry})" for entry in matching)
    raise ConfigError(f"which run? {candidates}. Say its number: colocate debug {matching[0]}")


def _stop_name(stop: Mapping[str, Any]) -> str:
    return f"{stop['group']}/{stop['role'] or 'function'}/{stop['rank']}"


def _stop_rows(stops: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for stop in stops:
        yield {
            "rank": _stop_name(stop),
            "runs": stop["call"],
            "stopped at": stop["where"],
            "by": stop["error"],
            "for": f"{stop['seconds']:.0f} s",
            "terminal": stop["terminal"] or "",
        }
