"""Show a run, with a progress bar on a terminal, plain lines elsewhere, and tables at the end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import attrs
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from colocate.driver import drawing
from colocate.texts import columns
from colocate_report.contention import make_contention_rows
from colocate_report.curves import rank_metric
from colocate_report.record import RunRecord, describe_restarts, describe_savings, phase_seconds, read_scalars
from colocate_report.tables import column_names
from colocate_run.slurm import describe_time_limit, has_job

if TYPE_CHECKING:
    from colocate_run.log import RunLog

Stage: TypeAlias = Callable[[str, str], AbstractContextManager[object]]
"""A context manager for each stage of a start, called with the stage's name and a description."""


PLAIN_WIDTH = 160  # In columns. Files and pipes have no width, and 80 columns would break tables.
STEP_WIDTH = 100  # The most columns of a step's line. metrics.jsonl has the other numbers.


class OutputClosed(SystemExit):
    """Raised if the reader of standard output has closed the pipe, as in `colocate run FILE | head`."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit as ended:  # rich raises a plain SystemExit, which a job may raise, too.
            raise OutputClosed(ended.code) from ended


def console(*, error: bool = False) -> Console:
    """Return a console for standard output or error: styled on a terminal, plain text elsewhere."""
    # Name the stream, because rich would otherwise follow when other code replaces sys.stdout for its prints.
    file = sys.stderr if error else sys.stdout
    terminal = _Console(file=file, highlight=False)
    return terminal if terminal.is_terminal and not terminal.is_jupyter else _plain_console(file)


def _plain_console(file: IO[str]) -> Console:
    # Without the `force_` options, rich may treat a file as a notebook, or as a terminal if FORCE_COLOR is set.
    return _Console(
        file=file, highlight=False, width=PLAIN_WIDTH, no_color=True, force_jupyter=False, force_terminal=False
    )


def show_table(title: str, rows: Sequence[Mapping[str, Any]], to: Console, *, spare: Sequence[str] = ()) -> None:
    """Print rows as a table under a title. Keys are columns, and numbers are right-aligned."""
    names = column_names(rows)
    if not names:
        return
    to.print(Text(f"\n{title}", "bold"))
    if to.is_terminal:
        to.print(fit_table(rows, to.width, spare=spare))
        return
    numeric = [_is_numeric(rows, name) for name in names]
    for text in columns([names, *([format_cell(row.get(name)) for name in names] for row in rows)], numeric):
        to.print(Text(text), soft_wrap=True)


def fit_table(rows: Sequence[Mapping[str, Any]], width: int, *, spare: Sequence[str] = ()) -> Group:
    """Return a table for a terminal. Spare columns that don't fit are left out and named in a note."""
    cells = {name: [name, *(format_cell(row.get(name)) for row in rows)] for name in column_names(rows)}
    left_out: list[str] = []
    for name in spare:
        if sum(2 + max(map(cell_len, column)) for column in cells.values()) - 2 <= width:
            break
        if cells.pop(name, None) is not None:
            left_out.append(name)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in cells:
        shown.add_column(Text(name), justify="right" if _is_numeric(rows, name) else "left", overflow="fold")
    for line in [*zip(*cells.values(), strict=True)][1:]:
        shown.add_row(*map(Text, line))
    more = [Text(f"(a wider terminal shows {', '.join(left_out)}, too)", "dim")] if left_out else []
    return Group(shown, *more)


def _is_numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(isinstance(row.get(name, 0), int | float) for row in rows)


def format_cell(value: Any) -> str:
    """Format a cell: floats with four significant digits, None as empty."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@attrs.define(eq=False)
class Screen:
    """The display of a run. Its methods run on the job's thread; `show_signal` also runs in a signal handler."""

    console: Console = attrs.field(factory=console)
    quiet: bool = False
    _live: Live | None = attrs.field(default=None, init=False)
    # Held while the live display starts or stops.
    _drawing: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _bar: Progress = attrs.field(init=False)
    _last: dict[str, Any] = attrs.field(factory=dict, init=False)
    _seconds: Mapping[str, float] = attrs.field(factory=dict, init=False)
    _running: list[tuple[str, float]] = attrs.field(factory=list, init=False)
    _total: int | None = attrs.field(default=None, init=False)
    _counts_steps: bool = attrs.field(default=True, init=False)
    _log: RunLog | None = attrs.field(default=None, init=False)
    _stages: list[tuple[str, float]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
        self._bar.add_task("starting", total=None)

    @contextlib.contextmanager
    def log_to(self, log: RunLog) -> Iterator[None]:
        """A context manager that copies all shown text to a log."""
        self._log = log
        try:
            yield
        finally:
            self._log = None

    @contextlib.contextmanager
    def show_start(self, name: str) -> Iterator[Stage]:
        """A context manager that shows the stages of a run's start, and prints the seconds of each stage at the end."""
        self._stages = []
        began = time.monotonic()
        with self._show_live(self._render_stages):
            yield lambda stage, what: self._show_stage(stage, f"{name}: {what}")
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self._stages)
        self.print_text(f"{name}: started in {time.monotonic() - began:.1f} s ({parts})")

    @contextlib.contextmanager
    def _show_stage(self, stage: str, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._running.append((what, began))
        if self._live is None:
            self.print_text(what)
        elif self._log is not None:
            self._log.write_text(f"{what}\n")
        try:
            yield
        finally:
            self._running.pop()
            self._stages.append((stage, time.monotonic() - began))

    @contextlib.contextmanager
    def _show_live(self, renderable: Callable[[], RenderableType], *, transient: bool = True) -> Iterator[None]:
        """A context manager that shows a live display on a terminal. Other output appears above the display."""
        if self.quiet or not self.console.is_terminal:
            yield
            return
        # Copy printed text to the log on entry, because `Live` then replaces the streams by rich's own streams.
        hears = contextlib.nullcontext() if self._log is None else self._log.capture_output()
        with Live(get_renderable=renderable, console=self.console, refresh_per_second=5, transient=transient) as live:
            self._live = live
            drawing.append(self._pause_drawing)
            try:
                with hears:
                    yield
            finally:
                drawing.remove(self._pause_drawing)
                with self._drawing:
                    self._live = None

    @contextlib.contextmanager
    def _pause_drawing(self) -> Iterator[None]:
        """A context manager that pauses the live display. It may run on any thread."""
        with self._drawing:
            if (live := self._live) is not None:
                live.stop()
        try:
            yield
        finally:
            with self._drawing:
                if live is not None and self._live is live:
                    live.start(refresh=True)

    def _render_stages(self) -> Text:
        now = self._running[-1:]
        return Text("".join(f"{task}  {time.monotonic() - since:.0f}s" for task, since in now))

    @contextlib.contextmanager
    def show_progress(self, name: str, directory: Path, step: int | None) -> Iterator[None]:
        """A context manager that shows a run's progress."""
        self.print_text(
            f"{name}: running in {shorten_path(directory)}" + ("" if step is None else f", going on after step {step}")
        )
        # Don't use `update`, because steps of an earlier run say nothing about the present speed.
        self._bar.reset(self._bar.task_ids[0], completed=step or 0, description=name)
        with self._show_live(self._render, transient=False):
            yield

    def set_total(self, steps: int) -> None:
        """Set the total number of steps."""
        self._total = steps
        self._bar.update(self._bar.task_ids[0], total=steps)

    def set_progress(self, done: int, total: int) -> None:
        """Set the progress bar directly. Logged steps no longer move the bar."""
        task, self._counts_steps = self._bar.task_ids[0], False
        if self._bar.tasks[0].total != total:  # Earlier progress says nothing about the present speed.
            self._bar.reset(task, total=total, completed=done)
        else:
            self._bar.update(task, completed=done)

    def enter_phase(self, phase: str) -> None:
        """Begin a phase. A nested phase is shown instead of the outer phase."""
        self._running.append((phase, time.monotonic()))

    def leave_phase(self) -> None:
        """End the innermost phase."""
        self._running.pop()

    def show_step(self, row: Mapping[str, Any]) -> None:
        """Show the numbers of a logged step."""
        scalars = read_scalars(row)
        self._last.update(scalars)
        self._seconds = row.get("seconds", {})
        if self._counts_steps:
            self._bar.update(self._bar.task_ids[0], completed=row["step"])
        if self.quiet and self._log is None:  # no reader
            return
        step = f"step {row['step']}" + (f"/{self._total}" if self._total is not None else "")
        line = _format_step(step, scalars, self._seconds)
        if not self.console.is_terminal:
            self.print_text(line)
        elif self._log is not None:  # On a terminal, the bar shows the numbers.
            self._log.write_text(f"{line}\n")

    def show_signal(self, received: str) -> None:
        """Report a stop signal. This runs in a signal handler, so it takes no locks and uses no buffered streams."""
        hint = " (a second one ends it at once)" if received == "SIGINT" else ""
        self._bar.tasks[0].description = f"stopping after a checkpoint{hint}"
        limit = None if has_job() else describe_time_limit()
        line = f"{received}: stopping after a checkpoint{hint}" + (f"; {limit}" if limit else "") + "\n"
        if self._log is not None:
            self._log.write_text(line)
        if self._live is None and not self.quiet:
            with contextlib.suppress(OSError):  # Standard error may be closed.
                os.write(2, line.encode())

    def show_record(self, record: RunRecord) -> None:
        """Show a finished run: tables, time per phase and per role, memory, and the ownership tree."""
        for line in describe_restarts(record):
            self.print_text(line)
        for title, rows in record.tables.items():
            self._print_table(title, rows)
        whole = record.seconds or 1.0
        phases = [
            {"phase": phase, "seconds": round(seconds, 2), "share": f"{seconds / whole:.0%}"}
            for phase, seconds in phase_seconds(record).items()
        ]
        self._print_table("time per phase", phases)
        calls = [
            {"group": total.group, "role": total.role, "method": total.method, "calls": total.calls}
            | {"seconds": round(total.seconds, 3), "per call (ms)": round(1000 * total.seconds / total.calls, 3)}
            for total in record.totals
        ]
        self._print_table("time per role", calls)
        self._print_table("who waited for whom", make_contention_rows(record.contention))
        if text := describe_savings(record):
            self.print_text(f"\n{text}", wraps=self.console.is_terminal)
        for memory in record.memory:
            self.print_text(f"\n{memory}")
        self.print_text("\n" + record.tree.rstrip())

    def show_report_path(self, path: Path) -> None:
        """Print the path of the report."""
        self.print_text(f"\nreport: {shorten_path(path)}")

    def print_text(self, text: str, wraps: bool = False) -> None:
        """Print one or several lines. If `wraps` is set, long lines break between words."""
        if not self.quiet:
            self.console.print(Text(text), soft_wrap=not wraps)
        if self._log is not None:
            self._log.write_text(f"{text}\n")

    def log_text(self, text: str) -> None:
        """Write a text to the log only."""
        if self._log is not None:
            self._log.write_text(text)

    def _print_table(self, title: str, rows: Iterable[Mapping[str, Any]]) -> None:
        listed = list(rows)
        if not self.quiet:
            show_table(title, listed, self.console)
        if self._log is not None:
            text = io.StringIO()
            show_table(title, listed, _plain_console(text))
            self._log.write_text(text.getvalue())

    def _render(self) -> Group:
        now = self._running[-1:]  # Copy the last item, because the job's thread changes the list.
        doing = "".join(f"  now {phase} {time.monotonic() - since:.0f}s" for phase, since in now)
        numbers, times = _format_numbers(self._last), _format_seconds(self._seconds) + doing
        lines = [Text(f"  {numbers}"), Text(f"  {times.strip()}", style="dim")]
        return Group(self._bar, *(line for line in lines if line.plain.strip()))


def _format_numbers(scalars: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {format_cell(value)}" for name, value in scalars.items())


def _format_step(step: str, scalars: Mapping[str, Any], seconds: Mapping[str, float]) -> str:
    """Format a step's line with as many numbers as fit, the most important metrics first."""
    parts = [f"{name} {format_cell(scalars[name])}" for name in sorted(scalars, key=rank_metric)]
    parts += [f"{phase} {spent:.2f}s" for phase, spent in seconds.items()]
    line = "  ".join([step, *parts])
    left_out = 0
    while cell_len(line) > STEP_WIDTH and len(parts) > 1:
        parts.pop()
        left_out += 1
        line = "  ".join([step, *parts, f"(+{left_out} in metrics.jsonl)"])
    return line


def _format_seconds(seconds: Mapping[str, float]) -> str:
    return "  ".join(f"{phase} {spent:.2f}s" for phase, spent in seconds.items())


def shorten_path(directory: Path) -> str:
    """Return a folder's path, relative to the working directory if the folder is inside."""
    cwd = Path.cwd()
    return str(directory.relative_to(cwd)) if directory.is_relative_to(cwd) else str(directory)
