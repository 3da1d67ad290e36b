"""`colocate run`: run the job of a config, from the launch until everything is closed."""

from __future__ import annotations

import contextlib
import json as json_module
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer import BadParameter

from colocate.texts import find_amount_problem, format_count
from colocate_report.record import RunRecord
from colocate_run.cli.output import error_to_json, load_command_config, print_json, report_errors
from colocate_run.launch import open_config
from colocate_run.log import RunLog
from colocate_run.profiling import ProfileRequest
from colocate_run.recording import Resume, execute_job, start_run
from colocate_run.screen import OutputClosed, Screen
from colocate_run.slurm import refuse_many_tasks
from colocate_run.stopping import StopRequest, StopSignals

_LOST = "everything is closed, what came after the last checkpoint is lost"


def run_job(
    file: Path,
    executor: str | None,
    changes: Iterable[str],
    *,
    resume: Resume,
    json: bool,
    allow_import: bool = True,
    profile: str | None = None,
) -> int:
    """Run a config's job; return the exit status."""
    try:
        return _run_job(file, executor, changes, resume=resume, json=json, allow_import=allow_import, profile=profile)
    except SystemExit as ended:  # Report the exit, because Python would print only the message.
        if json:
            print_json({"errors": [error_to_json(ended)]})
        if isinstance(ended, OutputClosed):
            sys.stderr.write(f"nobody reads its output any more: {_LOST}\n")
        else:
            sys.stderr.write(f"ended by sys.exit({ended.code!r}): everything is closed\n")
        raise
    except StopRequest as asked:
        number = signal.Signals(asked.args[0])
        sys.stderr.write(f"{number.name} before the job began: everything is closed, there is nothing to save\n")
        return 128 + number
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {_LOST}\n")
        second = next((arg for arg in interrupt.args if isinstance(arg, int)), signal.SIGINT)
        return 128 + second


@report_errors
def _run_job(
    file: Path,
    executor: str | None,
    changes: Iterable[str],
    *,
    resume: Resume,
    json: bool,
    allow_import: bool,
    profile: str | None,
) -> int:
    selection = None if profile is None else ProfileRequest.parse(profile)
    screen, log = Screen(quiet=json), RunLog()
    # A job's prints must not mix with the JSON that a script reads.
    redirected = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with StopSignals(screen.show_signal) as signals, redirected, log.capture_output():
        refuse_many_tasks()
        config = load_command_config(file, executor, changes, allow_import=allow_import)
        with start_run(config, log, resume=resume, screen=screen, profile=selection) as begun:
            with contextlib.ExitStack() as stack:
                with screen.show_start(config.name) as stage:
                    job = stack.enter_context(open_config(config, stage, begun.capture_workers))
                record = execute_job(begun, job.runtime, job.groups, job.start_up, signals)
            screen.print_text(_count_closed(record))
            if record.stopped is not None:
                saved = [step for step, _ in begun.folder.list_checkpoints()]
                goes_on = (
                    f"saved up to step {saved[-1]}, go on with --resume" if saved else "nothing is saved to go on from"
                )
                screen.print_text(f"stopped by {record.stopped}{_describe_retries(signals.count)}; {goes_on}")
    if json:
        print_json(_summary_data(record))
    if begun.recorded.has_differences and record.stopped is None:
        return 1
    return 0 if record.stopped is None else 128 + signal.Signals[record.stopped]


def recording_changes(
    record: Sequence[str],
    limit: str | None,
    replay: Sequence[str],
    step: int | None,
    loose: bool,
    compare: Sequence[str],
    tolerance: float | None,
) -> list[str]:
    """Translate the recording options of the command line to config changes in the form of `--set`."""
    if tolerance is not None and (problem := find_amount_problem(tolerance)) is not None:
        raise BadParameter(f"--tolerance {problem}; 1e-5, say")
    options: dict[str, Any] = {
        "record": [role.strip() for options in record for role in options.split(",")] or None,
        "record_limit": limit,
        "replay": _parse_role_runs("--replay", replay) or None,
        "replay_from": step,
        "replay_loose": loose or None,
        "compare": _parse_role_runs("--compare", compare) or None,
        "tolerance": tolerance,
    }
    return [f"{key}={json_module.dumps(value)}" for key, value in options.items() if value is not None]


def _parse_role_runs(option: str, texts: Sequence[str]) -> dict[str, str]:
    runs: dict[str, str] = {}
    for text in texts:
        role, equals, run = text.partition("=")
        if not (role and equals and run):
            raise BadParameter(f"{text!r}: write {option} role=runs/first")
        if runs.setdefault(role, run) != run:
            raise BadParameter(f"{option} {role} is given twice: {runs[role]} and {run}")
    return runs


def _describe_retries(count: int) -> str:
    return f", the first of {count} signals" if count > 1 else ""


def _count_closed(record: RunRecord) -> str:
    """Return a text with the numbers of a run's closed pools, groups and other objects."""
    counts: Counter[str] = Counter()
    nodes = [json_module.loads(record.graph)]
    while nodes:
        node = nodes.pop()
        counts[node["kind"]] += 1
        nodes += node["children"]
    listed = [format_count(count, kind) for kind, count in counts.items()]
    return f"everything is closed: {', '.join(listed)}"


def _summary_data(record: RunRecord) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for row in record.metrics:
        last.update(row)
    for name in ("seconds", "time"):
        last.pop(name, None)
    return {
        "name": record.name,
        "directory": str(record.directory),
        "last": last,
        "seconds": round(record.seconds, 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in record.phases.items()},
        "stopped": record.stopped,
    }
