"""Give a job access to the run: groups, metrics, checkpoints, and requests to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate.driver import CheckpointsOfGroup, Driver, checkpoints_of, fail, find_checkpoints, regrow
from colocate.errors import ClosedError, ColocateError, GroupRestarted
from colocate.texts import format_error, format_value
from colocate_report.record import Leaving, LogRecord, Row, RunRecord, read_scalars
from colocate_report.trace import Trace
from colocate_run.folder import RunFolder
from colocate_run.leaving import Notices
from colocate_run.observing import LOGGED, RunObservers
from colocate_run.saving import Checkpoints
from colocate_run.stopping import StopRequest, StopSignals
from colocate_run.store import Store

if TYPE_CHECKING:
    from colocate.connecting import Runtime
    from colocate.driver import ColocatedGroup
    from colocate_run.profiling import StepProfile
    from colocate_run.screen import Screen


RESTART = "(restart)"
"""Name of the phase in which lost groups are restarted."""


@attrs.define(eq=False, repr=False)
class Run:
    """A job's interface to the run, passed as `job(run, **options)`.

    Attributes:
        name: The config's name.
        runtime: The runtime, seeded and connected.
        groups: The config's groups by name.
        directory: The run's folder, runs/<name>.
        resumed: The folder of the checkpoint to resume from; None for a new run. Groups of the config with a checkpoint
            in there are restored before the job is called.
        record: The record of the finished run; None before.
    """

    name: str
    runtime: Runtime
    groups: Mapping[str, ColocatedGroup]
    directory: Path
    resumed: Path | None
    _folder: RunFolder
    _screen: Screen
    _signals: StopSignals
    _metrics: list[Row]
    _observers: RunObservers | None = None
    _notices: Notices | None = None
    _store: Store | None = None
    record: RunRecord | None = attrs.field(default=None, init=False)
    _tables: dict[str, list[Row]] = attrs.field(factory=dict, init=False)
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)
    _phases: dict[str, float] = attrs.field(factory=dict, init=False)
    _checkpoints: Checkpoints = attrs.field(init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _warned: set[str] = attrs.field(factory=set, init=False)
    _profile: StepProfile | None = attrs.field(default=None, init=False)
    # Whether there is a new checkpoint, from which groups may restart on more slots.
    _looks_for_slots: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        bring = None if self._store is None else partial(self._store.upload_checkpoint, self._folder, self.name)
        self._checkpoints = Checkpoints(self._folder, self._group_checkpoints, self._on_checkpoint, bring)
        self._resume_from(self.resumed)

    def __repr__(self) -> str:
        return f"<run {self.name!r} in {self.directory}>"

    @property
    def stopping(self) -> bool:
        """Whether the user (Ctrl-C) or the system (SIGTERM) wants the job to write a checkpoint and return."""
        return self._signals.received is not None

    @property
    def leaving(self) -> Leaving | None:
        """The node or batch job that will be lost first, if the run has a notice of a loss; otherwise None.

        Clusters announce the removal of a node (Ray drains the node, a Dask worker's `--lifetime` ends), and Slurm a
        job's end by the time limit. After the loss of a node, a group with `on_failure: restart` restarts elsewhere.
        """
        departures = self._notices.departures if self._notices is not None else ()
        return departures[0] if departures else None

    def is_due(self, step: int, every: int = 0) -> bool:
        """Return whether a checkpoint is due: each `every` steps, before a stop, and once after each notice of a loss.

        A checkpoint in progress answers a notice; if the checkpoint fails, a new one is due.

        Args:
            step: The finished step.
            every: Steps between regular checkpoints; 0 for none.
        """
        return self.stopping or self._last_notice > self._checkpoints.answers or (every > 0 and step % every == 0)

    @property
    def _last_notice(self) -> int:
        return self._notices.last_number if self._notices is not None else 0

    def log(self, step: int, **scalars: float) -> None:
        """Append a row to metrics.jsonl, and show the numbers.

        Args:
            step: The step, an integer.
            **scalars: Numbers by name; a tensor or array of one element counts as a number.

        Raises:
            TypeError: A scalar isn't a number, or the step isn't an integer.
            ValueError: A scalar has the reserved name `seconds` or `time`, or is too large for a float; or the step is
                too large for 64 bits.
            ClosedError: The run is over.
            GroupRestarted: A group that ran with fewer slots (`at_least` of its pool) restarts with more.
        """
        self._check_open("log")
        for name, meaning in {"seconds": "those of run.timed", "time": "when it was logged"}.items():
            if name in scalars:
                raise ValueError(f"run.log: {name!r} is where a line has {meaning}; call the number otherwise")
        step = _check_step("run.log", step)
        now = time.time()
        row: dict[str, Any] = {"step": step, "time": round(now, 3)}
        row |= {name: _check_number(name, value) for name, value in scalars.items()}
        row = {**row, **Driver(self.runtime).take_weights_behind(), **row}
        seconds, self._seconds = self._seconds, {}
        if seconds:
            row["seconds"] = {phase: round(spent, 6) for phase, spent in seconds.items()}
        self._folder.append_metrics(row)
        self._metrics.append(row)
        self._screen.show_step({name: value for name, value in row.items() if value or "weights_behind" not in name})
        for trace in self._open_traces():
            trace.step(step)
        if self._observers:
            log_record = LogRecord(step, read_scalars(row), row.get("seconds", {}), now)
            self._observers.notify_later(Driver(self.runtime), LOGGED, log_record)
        Driver(self.runtime).mark(step)
        if self._profile is not None:
            self._profile.on_step(step)
        self._regrow_groups()

    def total(self, steps: int) -> None:
        """Set the total number of steps, for the progress bar."""
        self._screen.set_total(steps)

    def progress(self, done: int, total: int) -> None:
        """Set the progress bar of a job with more work than the logged steps, such as a warm-up."""
        self._screen.set_progress(done, total)

    def show(self, title: str, rows: Iterable[Row]) -> None:
        """Store a table for the end of the run and the report; replace a table with the same title.

        Raises:
            ClosedError: The run is over.
        """
        self._check_open("show")
        self._tables[title] = [dict(row) for row in rows]

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A context manager that adds the block's seconds to a phase. The next `log` includes these seconds."""
        start, began = time.perf_counter(), time.time()
        self._screen.enter_phase(phase)
        try:
            yield
        finally:
            self._screen.leave_phase()
            spent = time.perf_counter() - start
            for counts in (self._seconds, self._phases):
                counts[phase] = counts.get(phase, 0.0) + spent
            for trace in self._open_traces():
                trace.phase(phase, began, began + spent)

    def _open_traces(self) -> list[Trace]:
        return [observer for observer in Driver(self.runtime).observers if isinstance(observer, Trace)]

    def rewind(self) -> int | None:
        """Remove the rows logged after the last complete checkpoint; set `resumed` to this checkpoint.

        The job must then restore its groups from there, by `group.restore`.

        Returns:
            The checkpoint's step. None if there is no checkpoint yet; then nothing is removed.
        """
        self._checkpoints.wait_pending_quietly(self._screen.print_text)
        complete = self._folder.list_checkpoints()
        if not complete:
            return None
        step, resumed = complete[-1]
        self._resume_from(resumed)
        self._rewind_to(step)
        return step

    def _check_open(self, method: str) -> None:
        if self._is_over:
            raise ClosedError(
                f"run.{method}: this is after the block of run {self.name!r}, which is over by then; use it inside",
                closed_by="the end of its block",
            )

    def _rewind_to(self, step: int) -> None:
        self._metrics[:] = self._folder.rewind_metrics(step)
        self._seconds.clear()

    def _resume_from(self, resumed: Path | None) -> None:
        self.resumed = resumed
        Driver(self.runtime).resumed = {} if resumed is None else find_checkpoints(resumed)

    def _restore_groups(self, back: str | None) -> None:
        """Restore the config's groups from `resumed`.

        Args:
            back: The group that has just restarted, and may be at the run's checkpoint already.
        """
        for name, folder in Driver(self.runtime).resumed.items():
            group = self.groups.get(name)
            if group is None or not group.alive:  # The job itself spawns this group, or has closed the group.
                continue
            checkpoints = checkpoints_of(group)
            last = checkpoints.checkpoint
            if name != back or last is None or last.folder != folder or not checkpoints.is_current:
                self._screen.print_text(f"restoring group {name} from {folder.relative_to(self.directory)}")
                with self.timed("restore"):
                    group.restore(folder)

    def _restart_groups(self, restarted: GroupRestarted) -> None:
        """Return to the last checkpoint after a group's restart; without a checkpoint, construct all groups again."""
        if self.stopping:  # Don't restart now, because a resumed run starts all groups anyway.
            self._screen.print_text(f"{restarted.message.partition(chr(10))[0]}: not restarted, as the run is to end")
            raise StopRequest
        began = time.perf_counter()
        self._checkpoints.wait_pending_quietly(self._screen.print_text)
        complete = self._folder.list_checkpoints()
        final = [name for name, group in self.groups.items() if group.alive and not checkpoints_of(group).max_restarts]
        if not complete and final:
            restarted.add_note(
                "there is no checkpoint of the run yet, so the job would begin anew, with all groups as constructed; "
                f"that needs on_failure: restart in every group, which {', '.join(final)} lacks"
            )
            raise restarted
        self._screen.print_text(f"{restarted.message.partition(chr(10))[0]}: restarting group {restarted.group!r}")
        for group in self.groups.values():
            if not group.alive:  # The job has closed this group.
                continue
            if not complete and group.name != restarted.group:
                fail(group, restarted)  # Without a checkpoint, all groups must start again.
            group.wait_ready()
            # If the group has restored a checkpoint that isn't part of the run, restart the group once more.
            if not complete and not checkpoints_of(group).is_current:
                fail(group, restarted)
                group.wait_ready()
        step = self.rewind()
        if step is None:
            self._rewind_to(-1)
        self._phases[RESTART] = self._phases.get(RESTART, 0.0) + time.perf_counter() - began
        self._screen.print_text("going on " + ("from the start" if step is None else f"after step {step}"))

    @contextlib.contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A context manager that yields a folder for a checkpoint, which is complete if the block raises no error.

        If a group writes in the background (`group.checkpoint(directory / name, wait=False)`), the checkpoint is
        complete when these files are. The job continues meanwhile; the next checkpoint, and the job's end, wait. The
        last two checkpoints are kept.

        Args:
            step: The step, an integer of 0 or more, not before the last checkpoint's.

        Raises:
            TypeError: The step isn't an integer.
            ValueError: The step is too small, or too large for 64 bits.
            ClosedError: The run is over.
            RoleError: A group's background write of the previous checkpoint failed; this one isn't begun.
        """
        self._check_open("checkpoint")
        step = _check_step("run.checkpoint", step)
        if step < 0:
            raise ValueError(f"run.checkpoint: step={step} is less than 0")
        self._checkpoints.wait_pending()
        complete = self._folder.list_checkpoints()
        if complete and step < complete[-1][0]:
            raise ValueError(
                f"run.checkpoint: step={step} is before the run's last checkpoint, of step {complete[-1][0]}, from "
                "which the run would go on; steps count up"
            )
        with self._checkpoints.open_checkpoint(step, self._last_notice) as directory:
            yield directory

    def _regrow_groups(self) -> None:
        """Restart groups that have fewer slots than configured, if more are available and there is a new checkpoint.

        Raises:
            GroupRestarted: A group restarts: the job begins again at the checkpoint, and repeats the steps since.
        """
        looks, self._looks_for_slots = self._looks_for_slots, False
        failures: list[ColocateError] = []
        for name, group in self.groups.items() if looks and not self.stopping else ():
            try:
                if group.alive and (restarts := regrow(group)) is not None:
                    failures.append(restarts)
            except ColocateError as error:  # If the cluster doesn't answer, for example, the slots don't change.
                words = format_error(error).partition("\n")[0]
                self._screen.print_text(f"whether there are more slots for group {name} isn't known: {words}")
        if failures:
            raise failures[0]

    def _on_checkpoint(self, step: int, directory: Path) -> None:
        self._looks_for_slots = True
        self._warn_of_foreign_checkpoints(directory)
        if self._observers:
            self._observers.notify_later(Driver(self.runtime), "colocate_run_checkpointed", step, directory)

    def _group_checkpoints(self) -> list[CheckpointsOfGroup]:
        return [checkpoints_of(group) for group in self.runtime.groups.values()]

    def _warn_of_foreign_checkpoints(self, directory: Path) -> None:
        """Warn once about each group whose last checkpoint is outside of the run's, so that a resume ignores it."""
        for name, group in self.groups.items():
            last = checkpoints_of(group).written
            if last is not None and name not in self._warned and not last.folder.is_relative_to(directory):
                self._warned.add(name)
                self._screen.print_text(
                    f"group {name} was checkpointed to {last.folder}, outside of the run's checkpoint: --resume won't "
                    f"restore it from there; call group.checkpoint(directory / {name!r}) inside of run.checkpoint"
                )


def _check_number(name: str, value: Any) -> int | float:
    number = _to_scalar(value)
    if not isinstance(number, bool | int | float):
        raise TypeError(f"run.log: {name}={format_value(value)} is not a number")
    try:
        float(number)
    except OverflowError as error:
        raise ValueError(f"run.log: {name}={format_value(value)} is too large for a float") from error
    return number


def _check_step(what: str, step: Any) -> int:
    number = _to_scalar(step)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{what}: step={format_value(step)} is not a whole number")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what}: step={format_value(step)} is too large for 64 bits")
    return number


def _to_scalar(value: Any) -> Any:
    """Return the single element of a tensor, an array or a NumPy scalar; return any other value unchanged."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return value
