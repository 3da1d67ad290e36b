"""`run`: what a job gets to work with, and what remains of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs

from colocate._api.memory import GroupMemory
from colocate._job.folder import RunFolder
from colocate._job.log import RunLog, tail_of
from colocate._job.window import window
from colocate._plugins.plugins import find_job
from colocate._runs.calls import CallLog
from colocate._runs.record import Row, RunRecord
from colocate._system.deadline import Deadline
from colocate._system.jobs import error_text
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._system.tracebacks import told
from colocate.config.schema import Config
from colocate.errors import ColocateError, ConfigError, GroupRestarted

if TYPE_CHECKING:
    from colocate._api.group import ColocatedGroup
    from colocate._api.runtime import Runtime
    from colocate._job.screen import Screen


@attrs.define(eq=False)
class Run:
    """What a job works with: `job(run, **options)`.

    Attributes:
        name: The config's name.
        runtime: The runtime, seeded and connected.
        groups: The config's groups by name.
        directory: The run's folder, runs/<name>.
        resumed: The folder of the checkpoint to go on from; None for a new run.
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
    _tables: dict[str, list[Row]] = attrs.field(factory=dict, init=False)
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)
    _phases: dict[str, float] = attrs.field(factory=dict, init=False)

    @property
    def stopping(self) -> bool:
        """Whether the user (Ctrl-C) or the system (SIGTERM) wants it to end: write a checkpoint and return."""
        return self._signals.received is not None

    def log(self, step: int, **scalars: float) -> None:
        """Add a line to metrics.jsonl, and show it.

        Args:
            step: The step it belongs to.
            **scalars: Numbers by name; a tensor or array of one element counts as a number.
        """
        seconds, self._seconds = self._seconds, {}
        row: dict[str, Any] = {"step": step, **{name: _number(name, value) for name, value in scalars.items()}}
        if seconds:
            row["seconds"] = {phase: round(spent, 6) for phase, spent in seconds.items()}
        self._folder.append(row)
        self._metrics.append(row)
        self._screen.logged(row)

    def total(self, steps: int) -> None:
        """Say how many steps there will be, for the progress bar."""
        self._screen.total(steps)

    def show(self, title: str, rows: Iterable[Row]) -> None:
        """Keep a table for the end of the run and its report; the same title replaces."""
        self._tables[title] = [dict(row) for row in rows]

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the block's time as this phase's; the next `log` has the seconds of all phases since the last."""
        start = time.perf_counter()
        self._screen.entered(phase)
        try:
            yield
        finally:
            self._screen.left()
            spent = time.perf_counter() - start
            for counts in (self._seconds, self._phases):
                counts[phase] = counts.get(phase, 0.0) + spent

    def rewind(self) -> int | None:
        """Take back what was logged after the last complete checkpoint, which `resumed` is from now on.

        The job then has its roles go on from there.

        Returns:
            That checkpoint's step; None if there is no checkpoint yet: then nothing is taken back.
        """
        complete = self._folder.checkpoints()
        if not complete:
            return None
        step, self.resumed = complete[-1]
        self._back_to(step)
        return step

    def _back_to(self, step: int) -> None:
        self._metrics[:] = self._folder.rewind(step)
        self._seconds.clear()

    def _restart(self, restarted: GroupRestarted) -> None:
        """Be as the last checkpoint was, with all groups as they were constructed or as that will restore them."""
        complete = self._folder.checkpoints()
        final = [name for name, group in self.groups.items() if group.alive and not group._node.restarts.limit]
        if not complete and final:
            restarted.add_note(
                "there is no checkpoint of the run yet, so the job would begin anew, with all groups as constructed; "
                f"that needs on_failure: restart in every group, which {', '.join(final)} lacks"
            )
            raise restarted
        self._screen.say(f"{restarted.message.partition(chr(10))[0]}: restarting group {restarted.group!r}")
        for group in self.groups.values():
            if not group.alive:  # the job has closed it
                continue
            if not complete and group.name != restarted.group:
                group._node.fail(restarted)  # it has come as far as the other: all begin anew, or none can
            group.wait_ready()
        step = self.rewind()
        if step is None:
            self._back_to(-1)
        self._screen.say("going on " + ("from the start" if step is None else f"after step {step}"))

    @contextlib.contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint into; it counts when the block ends well, and the last two are kept."""
        before = {group: group._node.restarts.checkpoint for group in self.groups.values()}
        try:
            with self._folder.checkpoint(step) as directory:
                yield directory
        except BaseException:
            for group, checkpoint in before.items():  # any made inside is gone
                group._node.restarts.checkpoint = checkpoint
            raise
        for group in self.groups.values():
            group._node.restarts.moved(directory, self._folder.of(step))
            group._node.restarts.progressed()


@attrs.define(eq=False)
class StopSignals:
    """While entered: a first Ctrl-C or SIGTERM is only noted, a second one raises KeyboardInterrupt.

    Attributes:
        received: The first signal's name.
    """

    _noticed: Callable[[str], None]
    received: str | None = None
    _previous: dict[int, Any] = attrs.field(factory=dict, init=False)

    def __enter__(self) -> StopSignals:
        # Python lets the main thread alone set handlers; a job run elsewhere is stopped by whoever runs it.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        self._noticed(self.received)


@attrs.define(eq=False)
class Begun:
    """A run that has its folder, before its job begins.

    Attributes:
        config: Its config.
        job: The function and its options.
        folder: Its folder.
        step: The step it goes on from; None for a new run.
        metrics: What was logged up to that step.
        screen: Where it is shown.
        started: Whether all is there that the job needs; until then there is nothing to report but what went wrong.
    """

    config: Config
    job: Callable[[Run], object]
    folder: RunFolder
    step: int | None
    metrics: list[Row]
    screen: Screen
    started: bool = attrs.field(default=False, init=False)


@contextlib.contextmanager
def begin(config: Config, log: RunLog, *, resume: bool, screen: Screen) -> Iterator[Begun]:
    """Give a config's run its folder. The log goes on there, and what ends the block by an error is told there.

    Args:
        config: The config.
        log: Hears what is printed.
        resume: Go on from the last complete checkpoint of a run of this name.
        screen: Where it is shown.

    Raises:
        ConfigError: The config has no job, or there is nothing to resume.
    """
    if config.job is None:
        raise ConfigError(f"config {config.name!r} has no job to run; add one: `job: plugin.job`, or module:function")
    function, options = find_job(config.job.use).load(), config.job.with_
    folder, step, metrics = _folder(config.name, resume)
    folder.write("config.yaml", config.dump())
    folder.remove("error.txt")
    log.open(folder.path / "log.txt")
    begun = Begun(config, lambda run: function(run, **options), folder, step, metrics, screen)
    since = time.time()
    try:
        with screen.logging(log):
            yield begun
    except KeyboardInterrupt:  # a second Ctrl-C: at once
        raise
    except BaseException as error:
        text = told(error)
        log.write(text)
        try:
            folder.write("error.txt", text)
        except OSError as other:
            error.add_note(f"it could not be written to {folder.path / 'error.txt'}: {other}")
        if not begun.started:
            _report_failure(lambda: _never_started(begun, since), error)
        raise
    finally:
        log.close()
        if log.fault is not None:
            screen.say(f"log.txt isn't whole: {log.fault}")


def execute(begun: Begun, runtime: Runtime, groups: Mapping[str, ColocatedGroup], start_up: float) -> RunRecord:
    """Run a config's job and write everything that remains of it.

    Args:
        begun: The run.
        runtime: Its runtime.
        groups: Its groups.
        start_up: Seconds that starting these took.
    """
    begun.started = True
    folder, screen = begun.folder, begun.screen
    calls = CallLog(begun.config)
    runtime.observe(calls)
    started = time.time() - start_up
    signals = StopSignals(screen.stopping)
    resumed = None if begun.step is None else folder.checkpoints()[-1][1]
    name = begun.config.name
    run = Run(name, runtime, groups, folder.path, resumed, folder, screen, signals, begun.metrics)
    try:
        with (
            contextlib.closing(folder),
            window(runtime, name),
            runtime.trace(folder.free("trace", ".json")) if begun.config.trace else contextlib.nullcontext(),
            screen.running(name, folder.path, begun.step),
            signals,
        ):
            _until_done(run, lambda: begun.job(run))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _report_failure(lambda: _record(run, calls, started, start_up), error)
        raise
    record = _record(run, calls, started, start_up)
    screen.finished(record)
    screen.reported(_report(record))
    return record


def _until_done(run: Run, job: Callable[[], object]) -> None:
    """Run the job; once more, from its last checkpoint, whenever a group has been restarted under it.

    One that ends by `sys.exit()` or `sys.exit(0)` has come to its end.
    """
    while True:
        try:
            job()
        except GroupRestarted as restarted:
            run._restart(restarted)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
            return
        else:
            return


def _record(run: Run, calls: CallLog, started: float, start_up: float) -> RunRecord:
    _settle(run.runtime)
    return RunRecord(
        name=run.name,
        directory=run.directory,
        config=run._folder.config(),
        metrics=tuple(run._metrics),
        tables=run._tables,
        totals=calls.totals(),
        spans=calls.spans(),
        phases=run._phases,
        tree=run.runtime.graph.render("tree"),
        graph=run.runtime.graph.render("json"),
        environment=environment(),
        started=started,
        seconds=time.time() - started,
        stopped=run._signals.received,
        start_up=start_up,
        memory=_memory(run),
        log=tail_of(run.directory / "log.txt"),
    )


def _memory(run: Run) -> tuple[GroupMemory, ...]:
    """What groups use their memory for, where roles hold some."""
    found: list[GroupMemory] = []
    deadline = Deadline(LEDGERS_WITHIN_S)
    for name, group in run.runtime.groups.items():
        if group.state != "ready":
            continue
        try:
            told = group.memory(deadline.left)
        except (ColocateError, TimeoutError) as error:
            run._screen.say(f"what the memory of group {name!r} was used for isn't known: {error_text(error)}")
        else:
            found += [told] if any(role.total for slot in told.slots for role in slot.roles) else []
    return tuple(found)


def _never_started(begun: Begun, started: float) -> RunRecord:
    return RunRecord(
        name=begun.config.name,
        directory=begun.folder.path,
        config=begun.folder.config(),
        metrics=tuple(begun.metrics),
        tables={},
        totals=(),
        spans=(),
        phases={},
        tree="",
        graph="",
        environment=environment(),
        started=started,
        seconds=time.time() - started,
        log=tail_of(begun.folder.path / "log.txt"),
    )


def environment() -> dict[str, str]:
    """Versions and machine, as people ask for them when numbers differ."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    for name in ("colocate", "torch", "numpy", "transformers", "ray", "distributed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def _folder(name: str, resume: bool) -> tuple[RunFolder, int | None, list[Row]]:
    root = Path("runs")
    if not resume:
        return RunFolder.create(name, root), None, []
    folder = RunFolder.latest(name, root)
    step, _ = folder.checkpoints()[-1]
    return folder, step, [*folder.rewind(step)]


def _settle(runtime: Runtime) -> None:
    """Wait until observers have been told of every call that has ended, unless one of them doesn't return."""
    if not runtime.alive:  # a job may close what it was given, and closing has told them
        return
    runtime._node.services.settle()


def _report(record: RunRecord, error: str | None = None) -> Path | None:
    """Write report.html; None where what makes it isn't installed."""
    if importlib.util.find_spec("jinja2") is None:
        return None
    from colocate import report

    return report.write(record.directory, record, error=error)


def _report_failure(record: Callable[[], RunRecord], error: BaseException) -> None:
    """Write the report of a job that failed; what goes wrong in that is a note on its error, not in its place."""
    try:
        _report(record(), told(error).strip())
    except Exception as other:
        error.add_note(f"its report could not be written: {type(other).__name__}: {other}")


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, bool | int | float):
        return value
    try:
        number = value.item()  # a tensor, an array or a NumPy scalar of one element
    except (AttributeError, ValueError, RuntimeError) as error:
        raise TypeError(f"run.log: {name}={value!r} is not a number") from error
    if not isinstance(number, bool | int | float):
        raise TypeError(f"run.log: {name}={value!r} is not a number")
    return number
