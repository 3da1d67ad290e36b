"""Record a run: create the run's folder, count calls, write the report, and notify observers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

import colocate_report
from colocate.driver import LEDGERS_WITHIN_S, Deadline, Driver, is_runtime
from colocate.errors import ClusterError, ColocateError, ConfigError, GroupRestarted
from colocate.plugins import find_job
from colocate.signatures import arguments_of
from colocate.texts import format_error, format_exception
from colocate_report.calls import CallLog
from colocate_report.devices import DeviceLog
from colocate_report.record import Row, RunInfo, RunRecord
from colocate_report.window import open_window
from colocate_run.config.schema import Config
from colocate_run.config.secrets import hide_secrets
from colocate_run.config.source import config_text
from colocate_run.environment import describe_environment, describe_origin
from colocate_run.folder import RunFolder
from colocate_run.leaving import Notices
from colocate_run.lock import lock_folder
from colocate_run.log import RunLog, read_tail
from colocate_run.logs import FOLDER as LOGS, WorkerLogs
from colocate_run.observing import LEAVING, RunObservers
from colocate_run.profiling import ProfileRequest, StepProfile
from colocate_run.recorded import RecordedRoles
from colocate_run.run import Run
from colocate_run.screen import OutputClosed, Screen
from colocate_run.stopping import StopRequest, StopSignals
from colocate_run.store import Store

if TYPE_CHECKING:
    from colocate.connecting import Runtime
    from colocate.driver import ColocatedGroup, GroupMemory

Resume: TypeAlias = Literal[False, True, "auto"]
"""Whether to resume the last complete checkpoint of the name; "auto": resume if there is one, else start anew."""


@attrs.define(eq=False)
class StartedRun:
    """A run that has a folder, before the job begins."""

    name: str
    folder: RunFolder
    step: int | None  # The step to resume from; None for a new run.
    metrics: list[Row]  # The rows that were logged up to `step`.
    screen: Screen
    config: Mapping[str, Any] = attrs.field(factory=dict)  # The config as plain data; empty for a run without config.
    trace: bool = False
    job: Callable[[Run], object] | None = None  # The job; None for a script's block.
    store: Store | None = None
    profile: ProfileRequest | None = None
    recorded: RecordedRoles = attrs.field(factory=RecordedRoles)
    observers: RunObservers = attrs.field(init=False)
    logs: WorkerLogs = attrs.field(init=False)
    environment: Mapping[str, str] = attrs.field(init=False)  # Software versions, machine, command line and commit.
    # Whether runtime and groups are ready. Until then, a report has only the error.
    started: bool = attrs.field(default=False, init=False)
    _process: int = attrs.field(factory=os.getpid, init=False)

    def __attrs_post_init__(self) -> None:
        self.observers = RunObservers(self.screen)
        self.logs = WorkerLogs(self.folder.path)
        self.environment = {**describe_environment(), **describe_origin()}

    def capture_workers(self, runtime: Runtime) -> bool:
        """Write the output of a runtime's workers to the run's logs; return False if this was set up before."""
        return Driver(runtime).set_output_handler(self.logs.on_line)

    @property
    def is_own_process(self) -> bool:
        """Whether this process began the run. A forked child of this process must not end the run."""
        return os.getpid() == self._process

    def ends_at_once(self, error: BaseException) -> bool:
        """Return whether the run ends without a report, after a job's second Ctrl-C or in a forked child.

        In a script's block the first Ctrl-C is reported.
        """
        return not self.is_own_process or (self.job is not None and isinstance(error, KeyboardInterrupt))


def start_run(
    config: Config, log: RunLog, *, resume: Resume, screen: Screen, profile: ProfileRequest | None = None
) -> AbstractContextManager[StartedRun]:
    """Create the folder of a config's run, or choose the folder to resume.

    In the returned block the log is written to that folder, and so is an error that ends the block.
    """
    if config.job is None:
        raise ConfigError(f"config {config.name!r} has no job to run; add one: `job: plugin.job`, or module:function")
    function = find_job(config.job.use).load()
    options = arguments_of(function, config.job.use, skip=1).convert(config.job.with_)
    with contextlib.ExitStack() as stack:
        store = None if config.checkpoints is None else Store(config.checkpoints)
        folder, step, metrics = _open_folder(config.name, resume, screen, stack, store)
        folder.write_file("config.yaml", config.dump())
        plain, job = hide_secrets(config.to_dict()), lambda run: function(run, **options)
        begun = StartedRun(config.name, folder, step, metrics, screen, plain, config.trace, job, store, profile)
        begun.recorded = RecordedRoles.from_config(config)
        return _capture_into_folder(begun, log, config.observe, stack.pop_all().close)


def execute_job(
    begun: StartedRun, runtime: Runtime, groups: Mapping[str, ColocatedGroup], start_up: float, signals: StopSignals
) -> RunRecord:
    """Run a config's job, write the report, and return the record."""
    job = begun.job
    assert job is not None
    with _collect_records(begun, runtime, groups, signals, start_up) as run:
        _run_until_done(run, lambda: job(run))
    if run.record is None:
        sys.exit()  # This is a forked child of the job, which ends here.
    return run.record


@contextlib.contextmanager
def record(
    runtime: Runtime, directory: str | os.PathLike[str], *, observe: Sequence[object] = (), trace: bool = False
) -> Iterator[Run]:
    """Record a block of a script or notebook as a run, in a folder with metrics, log and report.

    The block gets the same object as a job: `run.log`, `run.timed`, `run.show`, `run.checkpoint`. `run.groups` are the
    groups at the beginning of the block. No signal handlers are installed.

    Args:
        runtime: The runtime with the calls to count.
        directory: The folder, as in "runs/x"; runs/x-2 and so on if that exists.
        observe: Observers, as in a config: "tensorboard", {"use": "mlflow", "with": {...}}, or an object with hooks.
        trace: Whether to write a trace.json for Perfetto into the folder.

    Raises:
        ConfigError: The runtime argument is no runtime, or the folder can't be made.
        PluginError: An observer can't be loaded.
    """
    if not is_runtime(runtime):
        raise ConfigError(f"colocate.record(runtime, directory): a {type(runtime).__name__} is no runtime")
    path = Path(os.path.abspath(directory))  # Make the path absolute, because "." and ".." have no names.
    screen, log = Screen(quiet=True), RunLog()
    folder = RunFolder.create(path.name, path.parent)
    begun = StartedRun(folder.path.name, folder, None, [], screen, trace=trace)
    with (
        log.capture_output(),
        _capture_into_folder(begun, log, observe),
        _collect_records(begun, runtime, runtime.groups, StopSignals(screen.show_signal), 0.0) as run,
    ):
        yield run


@contextlib.contextmanager
def _capture_into_folder(
    begun: StartedRun, log: RunLog, observe: Sequence[object], then: Callable[[], object] = lambda: None
) -> Iterator[StartedRun]:
    """A context manager that logs a run's output and error, notifies observers of the start, and closes the logs."""
    folder, screen, since = begun.folder, begun.screen, time.time()
    folder.remove_file("error.txt")
    log.open_file(folder.path / "log.txt")
    log.workers = begun.logs
    try:
        with screen.log_to(log):
            begun.observers.add_observers(observe)
            begun.observers.start_run(RunInfo(begun.name, folder.path, begun.config, begun.step, begun.environment))
            yield begun
    except BaseException as error:
        if begun.ends_at_once(error) or (begun.started and _is_success(error)):
            raise
        text = format_exception(error)
        log.write_text(text)
        try:
            folder.write_file("error.txt", text)
            for name, logged in ((isinstance(error, ClusterError) and error.logs) or {}).items():
                folder.write_file(f"engine-{name}", logged)
        except OSError as other:
            error.add_note(f"it could not be written to {folder.path / 'error.txt'}: {other}")
        if not begun.started:
            _report_failure(begun, lambda: _make_unstarted_record(begun, since), error)
        raise
    finally:
        log.workers = None
        begun.logs.close()
        log.close()
        then()
        for name, fault in (("log.txt", log.fault), (f"{LOGS}/", begun.logs.fault)):
            if fault is not None:
                screen.print_text(f"{name} isn't whole: {fault}")


@contextlib.contextmanager
def _collect_records(
    begun: StartedRun, runtime: Runtime, groups: Mapping[str, ColocatedGroup], signals: StopSignals, start_up: float
) -> Iterator[Run]:
    """A context manager that counts a run's calls, then writes the report and notifies observers of the end."""
    begun.started = True
    name, folder, screen = begun.name, begun.folder, begun.screen
    driver = Driver(runtime)
    calls = CallLog(driver.slot_of)
    hears = begun.capture_workers(runtime)
    devices = DeviceLog()
    observers = (calls, devices, *([begun.observers] if begun.observers else []))
    for observer in observers:
        runtime.observe(observer)
    # Report the groups that were spawned before the observers were added.
    for group in runtime.groups.values() if begun.observers else ():
        driver.call_soon(partial(begun.observers.colocate_group_spawned, group))
    started = time.time() - start_up
    resumed = None if begun.step is None else folder.list_checkpoints()[-1][1]
    notices = Notices(driver, partial(begun.observers.notify_later, driver, LEAVING))
    parts = folder, screen, signals, begun.metrics, begun.observers, notices, begun.store
    run = Run(name, runtime, groups, folder.path, resumed, *parts)
    driver.run = run

    def on_signal() -> None:
        driver.release_debuggers()  # Resume stopped ranks, which would never finish the step.
        notices.on_signal()

    signals.on_stop = on_signal
    recorded = partial(_make_record, begun, run, calls, devices, started, start_up)
    try:
        with (
            contextlib.closing(folder),
            open_window(runtime, folder.path.name),
            _watch_devices(driver),
            runtime.trace(folder.free_name("trace", ".json")) if begun.trace else contextlib.nullcontext(),
            screen.show_progress(name, folder.path, begun.step),
            notices,
            begun.recorded.record_roles(runtime, groups, folder, run),
        ):
            try:
                if begun.profile is not None:
                    run._profile = StepProfile(begun.profile, driver, groups, screen.print_text)
                yield run
                run._checkpoints.wait_pending()
                if run._profile is not None:
                    run._profile.close()
            except BaseException as error:
                if run._profile is not None and begun.is_own_process:
                    run._profile.discard()
                if not begun.ends_at_once(error):
                    run._checkpoints.wait_pending_quietly(screen.print_text)
                raise
            finally:
                run._is_over = True
                driver.resumed = {}
    except BaseException as error:
        if begun.is_own_process and _is_success(error):
            _finish_run(begun, run, recorded)
        elif not begun.ends_at_once(error):
            _report_failure(begun, recorded, error)
        raise
    else:
        if begun.is_own_process:
            _finish_run(begun, run, recorded)
    finally:
        driver.run = None
        for observer in observers:
            driver.remove_observer(observer)
        if hears:
            driver.set_output_handler(None)


@contextlib.contextmanager
def _watch_devices(driver: Driver) -> Iterator[None]:
    stop = driver.watch_devices()
    try:
        yield
    finally:
        stop()


def _run_until_done(run: Run, job: Callable[[], object]) -> None:
    """Run the job, and run the job again from the last checkpoint after each restart of a group.

    A job that calls `sys.exit()` or `sys.exit(0)` has ended well. So has a run that is asked to end during a restore or
    restart, because there is nothing to save.
    """
    back: str | None = None
    signals = run._signals
    try:
        while True:
            try:
                run._restore_groups(back)
                signals.during = "a job"
                try:
                    job()
                except SystemExit as ended:
                    if not _is_success(ended):
                        raise
                run._checkpoints.wait_pending()
                return
            except GroupRestarted as restarted:
                signals.during = "no job"
                run._restart_groups(restarted)
                back = restarted.group
    except StopRequest:
        run.rewind()
    finally:
        signals.during = "the end"


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and not error.code))


def _finish_run(begun: StartedRun, run: Run, record: Callable[[], RunRecord]) -> None:
    run.record = record()
    with contextlib.suppress(OutputClosed):  # In `colocate run FILE | head` nobody reads the whole output.
        begun.screen.show_record(run.record)
    try:
        report = _write_report(run.record)
        with contextlib.suppress(OutputClosed):
            begun.screen.show_report_path(report)
    finally:
        begun.observers.finish_run(run.record, None)


def _make_record(
    begun: StartedRun, run: Run, calls: CallLog, devices: DeviceLog, started: float, start_up: float
) -> RunRecord:
    begun.observers.wait_delivered(Driver(run.runtime), run.directory)
    return RunRecord(
        name=run.name,
        directory=run.directory,
        config=config_text(run._folder.read_config()),
        metrics=tuple(run._metrics),
        tables=run._tables,
        totals=calls.method_totals(),
        spans=calls.last_spans(),
        phases=run._phases,
        tree=run.runtime.graph.render("tree"),
        graph=run.runtime.graph.render("json"),
        environment={**begun.environment, **describe_environment()},
        started=started,
        seconds=time.time() - started,
        stopped=run._signals.received,
        start_up=start_up,
        memory=_collect_memory(run),
        contention=calls.measure_contention(),
        idle=calls.idle_seconds(started + start_up, time.time()),
        devices=devices.uses(),
        handed_over=calls.list_handovers(),
        restarts=calls.list_restarts([started + start_up, *run._checkpoints.times]),
        log=read_tail(run.directory / "log.txt"),
    )


def _collect_memory(run: Run) -> tuple[GroupMemory, ...]:
    memories: list[GroupMemory] = []
    deadline = Deadline(LEDGERS_WITHIN_S)
    for name, group in run.runtime.groups.items():
        if group.state != "ready":
            continue
        try:
            memory = group.memory(deadline.seconds_left)
        except (ColocateError, TimeoutError) as error:
            run._screen.print_text(f"what the memory of group {name!r} was used for isn't known: {format_error(error)}")
        else:
            memories += [memory] if any(role.total for slot in memory.slots for role in slot.roles) else []
    return tuple(memories)


def _make_unstarted_record(begun: StartedRun, started: float) -> RunRecord:
    return RunRecord(
        name=begun.name,
        directory=begun.folder.path,
        config=config_text(begun.folder.read_config()),
        metrics=tuple(begun.metrics),
        tables={},
        totals=(),
        spans=(),
        phases={},
        tree="",
        graph="",
        environment=begun.environment,
        started=started,
        seconds=time.time() - started,
        log=read_tail(begun.folder.path / "log.txt"),
    )


def _open_folder(
    name: str, resume: Resume, screen: Screen, stack: contextlib.ExitStack, store: Store | None
) -> tuple[RunFolder, int | None, list[Row]]:
    """Create or find a run's folder, and lock the folder; return the folder, and the step and rows to resume from."""
    root = Path("runs")
    if resume and store is not None:
        store.download_run(name, root, screen.print_text)
    previous = _find_resumable(name, root, resume) if resume else None
    claims = [] if store is None else [store.has_run]
    folder = previous or RunFolder.create(name, root, *claims, shared=resume == "auto")
    folder.check_lock = stack.enter_context(lock_folder(folder.path, screen.print_text)).check_owned
    folder.remove_unfinished()
    if not (complete := folder.list_checkpoints()):
        folder.move_aside("metrics", ".jsonl")  # These rows are from an attempt without a checkpoint.
        return folder, None, []
    step, _ = complete[-1]
    return folder, step, [*folder.rewind_metrics(step)]


def _find_resumable(name: str, root: Path, resume: Resume) -> RunFolder | None:
    """Return the folder to resume or to restart in; None if `resume` is "auto" and there is no earlier run."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is not None and not re.search(rf"(?<!\d){re.escape(task)}(?!\d)", name):
        raise ConfigError(
            f"this is task {task} of an array of jobs, in which all runs are called {name!r}: it might go on with "
            "another one's; give each its own, name: %s-${SLURM_ARRAY_TASK_ID}" % name
        )
    if resume == "auto":
        folders = RunFolder.find_all(name, root)
        return next((folder for folder in folders if folder.list_checkpoints()), folders[0] if folders else None)
    return RunFolder.find_latest(name, root)


def _write_report(record: RunRecord, error: str | None = None) -> Path:
    return colocate_report.write(record.directory, record, error=error)


def _report_failure(begun: StartedRun, record: Callable[[], RunRecord], error: BaseException) -> None:
    """Write the report of a failed run. If the report itself fails, only add a note to the run's error."""
    run_record = _make_unstarted_record(begun, time.time())
    try:
        run_record = record()
        begun.screen.show_report_path(_write_report(run_record, format_exception(error).strip()))
    except Exception as other:
        error.add_note(f"its report could not be written: {type(other).__name__}: {other}")
    finally:
        begun.observers.finish_run(run_record, error)
