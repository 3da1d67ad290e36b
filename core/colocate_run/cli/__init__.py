"""Define the command line, with one function for each command (`colocate run`, `check`, `plan` ...).

The modules of the commands and of shell completion are imported on demand, so that the command line starts fast.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="colocate",
    help="Several roles fused into one process per GPU, on Ray, on Dask or on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def complete_with(name: str) -> Callable[[str], list[Any]]:
    """Return a callback for shell completion, which imports `colocate_run.cli.installed` only when called."""

    def complete(incomplete: str) -> list[Any]:
        completions: list[Any] = getattr(import_module("colocate_run.cli.installed"), name)(incomplete)
        return completions

    return complete


_configs, _executors, _plugins = map(complete_with, ("configs", "executors", "plugin_names"))


File = Annotated[Path, typer.Argument(help="The config, a YAML file.", show_default=False, autocompletion=_configs)]
Executor = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="Another executor; replaces the config's whole entry.",
        autocompletion=_executors,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change the config, as in --set pools.main.slots=2."),
]
ClusterOf = Annotated[
    Path | None, typer.Argument(help="A config, whose cluster is looked at.", autocompletion=_configs)
]
Address = Annotated[
    str | None, typer.Option("--address", metavar="ADDRESS", help="The cluster to join, as the executor names it.")
]
NoImport = Annotated[
    bool, typer.Option("--no-import", help="For a config of others: it may name plugins, but no modules of its own.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from colocate_run.cli.installed import version_lines

        for line in version_lines():
            typer.echo(line)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show versions: colocate, Python, Ray, Dask."
        ),
    ] = False,
) -> None:
    """Several roles fused into one process per GPU, on Ray, on Dask or on your own machine."""


class Resume(StrEnum):
    """The values of the option `--resume`."""

    last = "last"
    auto = "auto"


class _Run(TyperCommand):
    """A command that accepts both `--resume` and `--resume=auto`.

    With Click's own optional values, the config file would be taken for the value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--resume=last" if arg == "--resume" else arg for arg in args])


@app.command(cls=_Run)
def run(
    file: File,
    executor: Executor = None,
    changes: Changes = None,
    resume: Annotated[
        Resume | None,
        typer.Option(
            "--resume",
            metavar="[=auto]",
            help="Go on from the last complete checkpoint; with =auto, begin where there is none.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="steps=A:B[,roles=NAME][,ranks=N][,memory][,py-spy]",
            help="Profile these steps, for Perfetto and the report; py-spy: Python stacks, also of a whole run.",
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Stop where a role raises, in a debugger; on worker processes only."),
    ] = False,
    record: Annotated[
        list[str] | None,
        typer.Option(
            "--record", metavar="ROLE[:inputs][,ROLE]", help="Keep what the calls of these roles give (and are given)."
        ),
    ] = None,
    record_limit: Annotated[
        str | None, typer.Option("--record-limit", metavar="SIZE", help="How much of it at most, as 20GiB.")
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option("--replay", metavar="ROLE=RUN", help="Answer the calls of a role as recorded; it isn't built."),
    ] = None,
    replay_from: Annotated[
        int | None, typer.Option("--replay-from", metavar="STEP", help="Begin with this step of the recording.")
    ] = None,
    replay_loose: Annotated[
        bool, typer.Option("--replay-loose", help="Only warn of calls that differ from recorded ones.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="ROLE=RUN", help="Compare what a role gives with what was recorded."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="NUMBER", help="How far compared numbers may be away.")
    ] = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """Run the job of a config."""
    from colocate_run.cli.run import recording_changes, run_job

    options = record or [], record_limit, replay or [], replay_from, replay_loose, compare or [], tolerance
    how: Literal[False, True, "auto"] = False if resume is None else True if resume is Resume.last else "auto"
    changes = [*(changes or []), *(["executor.with.debug=true"] if debug else []), *recording_changes(*options)]
    may = not no_import
    raise typer.Exit(run_job(file, executor, changes, resume=how, json=json, allow_import=may, profile=profile))


@app.command()
def check(
    file: File,
    executor: Executor = None,
    changes: Changes = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """Check a config and show the plan, or every mistake; start nothing."""
    from colocate_run.cli.check import show_plan

    raise typer.Exit(show_plan(file, executor, changes or [], json=json, allow_import=not no_import))


@app.command()
def plan(
    file: File,
    executor: Executor = None,
    changes: Changes = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """Show how much memory the roles of a config will hold, and which must take turns; build and start nothing."""
    from colocate_run.cli.plan import show_memory

    raise typer.Exit(show_memory(file, executor, changes or [], json=json, allow_import=not no_import))


@app.command()
def schema() -> None:
    """Print a JSON Schema of configs, for editors."""
    from colocate_run.cli.schema import show_schema

    raise typer.Exit(show_schema())


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="The example; without a name they are listed.")] = None,
) -> None:
    """Copy an example of the documentation into this folder."""
    from colocate_run.cli.example import copy_example

    raise typer.Exit(copy_example(name))


@app.command()
def plugins(
    name: Annotated[
        str | None, typer.Argument(help="One of them, to show in detail: it is imported.", autocompletion=_plugins)
    ] = None,
    json: Json = False,
) -> None:
    """List executors and plugins, or show the details of one plugin."""
    if name is None:
        from colocate_run.cli.plugin import show_plugins

        raise typer.Exit(show_plugins(json=json))
    from colocate_run.cli.plugin import show_plugin

    raise typer.Exit(show_plugin(name, json=json))


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="A config to check against this machine.", autocompletion=_configs)
    ] = None,
    executor: Executor = None,
    changes: Changes = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """Show versions, executors and devices, and check a config against this machine."""
    from colocate_run.cli.doctor import examine

    raise typer.Exit(examine(file, executor, changes or [], json=json, allow_import=not no_import))


@app.command()
def audit(
    file: ClusterOf = None,
    executor: Executor = None,
    address: Address = None,
    changes: Changes = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """Find processes and files that colocate's dead drivers have left, on this machine or on a cluster."""
    from colocate_run.cli.cluster import Cluster, find_strays

    raise typer.Exit(find_strays(Cluster(file, executor, address, changes or [], not no_import), json=json))


@app.command()
def top(
    job: Annotated[
        str | None, typer.Argument(help="The job's name, or its driver's process; the only one by default.")
    ] = None,
    file: ClusterOf = None,
    executor: Executor = None,
    address: Address = None,
    changes: Changes = None,
    no_import: NoImport = False,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=86400, help="How often to look.")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Watch a job of this machine or of a cluster: memory and load of roles, running and waiting calls."""
    from colocate_run.cli.cluster import Cluster
    from colocate_run.cli.top import show_top

    cluster = Cluster(file, executor, address, changes or [], not no_import)
    raise typer.Exit(show_top(job, cluster, once=once, every=every, json=json))


@app.command()
def recordings(
    run: Annotated[Path, typer.Argument(help="The run's folder, or that of a recording.", show_default=False)],
    role: Annotated[str | None, typer.Option("--role", metavar="NAME", help="List each call of this role.")] = None,
    json: Json = False,
) -> None:
    """List the recorded calls of a run, by role, with sizes."""
    from colocate_run.cli.recordings import show_recordings

    raise typer.Exit(show_recordings(run, role, json=json))


@app.command()
def stacks(
    job: Annotated[
        str | None, typer.Argument(help="The job's name, or its driver's process; the only one by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the stacks of all workers of a job on this machine: equal stacks once, with a list of the workers."""
    from colocate_run.cli.stacks import show_stacks

    raise typer.Exit(show_stacks(job, json=json))


@app.command()
def debug(
    job: Annotated[
        str | None, typer.Argument(help="The job's name, or its driver's process; the only one by default.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="[[GROUP/]ROLE/]RANK", help="Which rank, where several are stopped: without it a list."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Attach this terminal to a rank that breakpoint() or --debug has stopped, or list the stopped ranks."""
    from colocate_run.cli.debug import debug_rank

    raise typer.Exit(debug_rank(job, rank, json=json))


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="The run's folder, or its job's name or process.", show_default=False)],
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Of this group only.")] = None,
    role: Annotated[
        str | None, typer.Option("--role", metavar="NAME", help="What this role's code prints only.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="NUMBER", min=0, help="Of the role's rank, or the worker's slot.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="So many of the last lines; 0 for all.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Show the output of a run's workers, so far or live."""
    from colocate_run.cli.logs import LogSelection, show_logs

    raise typer.Exit(show_logs(run, LogSelection(group, role, rank), lines=lines, follow=follow))


@app.command()
def groups(
    file: ClusterOf = None,
    executor: Executor = None,
    address: Address = None,
    changes: Changes = None,
    no_import: NoImport = False,
    json: Json = False,
) -> None:
    """List the detached pools of a cluster: groups, attached drivers, and seconds to live without a driver."""
    from colocate_run.cli.cluster import Cluster, show_groups

    raise typer.Exit(show_groups(Cluster(file, executor, address, changes or [], not no_import), json=json))


@app.command()
def close(
    name: Annotated[str, typer.Argument(help="The detached pool.", show_default=False)],
    file: ClusterOf = None,
    executor: Executor = None,
    address: Address = None,
    changes: Changes = None,
    no_import: NoImport = False,
    force: Annotated[bool, typer.Option("--force", help="Take it from the driver that is attached.")] = False,
    json: Json = False,
) -> None:
    """End a detached pool and free the slots. Refused while a driver is attached, except with --force."""
    from colocate_run.cli.cluster import Cluster, close_pool

    cluster = Cluster(file, executor, address, changes or [], not no_import)
    raise typer.Exit(close_pool(name, cluster, force=force, json=json))


def main() -> None:
    """Run the command `colocate`."""
    # Python's default error handler is "strict", and in the locale C "surrogateescape". Change only these two.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A job may print any text.
    app()
