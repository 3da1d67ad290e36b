"""Data about runs, for observers and the report: `RunInfo`, `LogRecord`, `Leaving` and `RunRecord`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from colocate.texts import format_count, format_size
from colocate_report.calls import Restart, Span, Total
from colocate_report.contention import Handover, RoleUse
from colocate_report.devices import DeviceUse

if TYPE_CHECKING:
    from colocate.driver import GroupMemory

Row: TypeAlias = Mapping[str, Any]


@attrs.frozen
class RunInfo:
    """The description of a new run, which observers get.

    Attributes:
        name: The config's name, or the name of the folder given to `record`.
        directory: The run's folder.
        config: The config with all defaults, and with hidden values under keys that look like secrets; empty for a run
            without a config.
        resumed: The step to resume after; None for a new run.
        environment: Versions and machine.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed: int | None
    environment: Mapping[str, str]


@attrs.frozen
class LogRecord:
    """A logged step, which observers get.

    Attributes:
        step: The step. After a failure a run may go back, and log the same step again.
        scalars: Numbers by name.
        seconds: Seconds per phase of the job since the last logged step.
        time: The time of the log call, in seconds of time.time().
    """

    step: int
    scalars: Mapping[str, float]
    seconds: Mapping[str, float]
    time: float


@attrs.frozen
class Leaving:
    """A node or batch job that a run will soon lose. Work since the last checkpoint would then be lost.

    Attributes:
        who: The node, as in "node n2", or the batch job.
        until: The latest time of the loss, in seconds of `time.time()`; None if unknown.
    """

    who: str
    until: float | None

    def __str__(self) -> str:
        if self.until is None:
            return f"{self.who} will end soon"
        at = time.strftime("%H:%M:%S", time.localtime(self.until))
        return f"{self.who} will end at {at}, in {max(0.0, self.until - time.time()):.0f} s"


@attrs.frozen(repr=False)
class RunRecord:
    """A finished run, as shown on the report and on the screen.

    Attributes:
        name: The config's name.
        directory: The run's folder.
        config: The config in YAML, with hidden values under keys that look like secrets.
        metrics: Logged rows, in order: `step`, `time` (of time.time()), scalars, and `seconds` per phase.
        tables: Tables of the job (`run.show`): rows by title.
        totals: Calls and seconds per group, role and method.
        spans: Busy times of each rank, by call (of a long run: the last ones).
        phases: Seconds per phase of the job.
        tree: The ownership graph before closing, as a tree.
        graph: The ownership graph as JSON.
        environment: Versions and machine.
        started: The time of the beginning (`time.time()`).
        seconds: Duration, including the start-up.
        stopped: The signal that ended the run early; None for a regular end.
        start_up: Seconds until all workers ran and had roles.
        log: The last part of the printed output.
        handed_over: Residents used on the slots of their makers: copies that fusing saved.
        contention: Busy and waiting times of roles on shared slots (of a long run: in the last part).
        restarts: Completed restarts of groups.
        devices: The GPUs of the slots, if they could be sampled.
        idle: Seconds of idle slots, by cause, summed (of a long run: in the last part).
        memory: The memory use of groups at the end of the job, if the workers answered.
    """

    name: str
    directory: Path
    config: str
    metrics: Sequence[Row]
    tables: Mapping[str, Sequence[Row]]
    totals: Sequence[Total]
    spans: Sequence[Span]
    phases: Mapping[str, float]
    tree: str
    graph: str
    environment: Mapping[str, str]
    started: float
    seconds: float
    stopped: str | None = None
    start_up: float = 0.0
    log: str = ""
    memory: Sequence[GroupMemory] = ()
    contention: Sequence[RoleUse] = ()
    handed_over: Sequence[Handover] = ()
    restarts: Sequence[Restart] = ()
    idle: Mapping[str, float] = attrs.field(factory=dict)
    devices: Sequence[DeviceUse] = ()

    def __repr__(self) -> str:
        """Return a text without metrics and spans, because a notebook shows the repr, and a long run has many spans."""
        return f"<record of run {self.name!r} in {self.directory}, {self.seconds:.1f} s>"


def read_scalars(row: Row) -> dict[str, Any]:
    """Return the logged numbers of a metrics row."""
    return {name: value for name, value in row.items() if name not in ("step", "time", "seconds")}


def describe_restarts(record: RunRecord) -> list[str]:
    """Return a line for each restart, with the lost time."""
    return [
        f"{restart.what} at {restart.at - record.started:.0f} s: {restart.lost:.0f} s lost"
        for restart in record.restarts
    ]


def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Return the seconds of a run by phase: the start-up, the job's phases, and the untimed rest."""
    phases = {"(start-up)": record.start_up, **record.phases} if record.start_up else dict(record.phases)
    rest = record.seconds - sum(phases.values())
    if phases and rest >= 0.005 * record.seconds:  # A smaller rest would be shown as 0 %.
        phases["(rest)"] = rest
    return phases


def describe_savings(record: RunRecord) -> str:
    """Describe the processes and copies that fusing has saved; empty if no slot has several roles."""
    return " ".join(_savings_sentences(record))


def _savings_sentences(record: RunRecord) -> Iterator[str]:
    processes = [slot for group in record.memory for slot in group.slots if slot.empty is not None]
    fewer = sum(len([role for role in slot.roles if role.role]) - 1 for slot in processes)
    if fewer > 0:
        # This is an upper limit, because processes that are forked from one template share memory.
        empty = f"up to {format_size(max(slot.empty or 0 for slot in processes))}"
        # Other processes' memory counts as context, too, so the smallest value is nearest to a real CUDA context.
        if contexts := [slot.unowned["context"] for slot in processes if slot.gpu is not None]:
            empty += f", and {format_size(min(contexts))} of its GPU, a context"
        yield (
            f"Fused, they are {format_count(len(processes), 'process')}; with one for each rank of each role there "
            "would be "
            f"{fewer:,} more, and an empty one has {empty}."
        )
    if record.handed_over:
        whole = format_size(sum(item.nbytes for item in record.handed_over))
        several = len({item.group for item in record.handed_over}) > 1
        pairs = ", ".join(
            f"{f'{item.group}: ' if several else ''}{item.maker or 'functions'} to {item.user or 'functions'} "
            f"{format_size(item.nbytes)}"
            for item in record.handed_over
        )
        used = f"Of kept results, {whole} were used where they lay"
        yield f"{used}; processes of their own would have copied them: {pairs}."
