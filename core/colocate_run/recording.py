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
from colocate.texts import error_text, told
from colocate_report.calls import CallLog
from colocate_report.devices import DeviceLog
from colocate_report.record import Row, RunInfo, RunRecord
from colocate_report.window import window
from colocate_run.config.schema import Config
from colocate_run.config.secrets import without_secrets
from colocate_run.config.source import config_text
from colocate_run.environment import environment, origin
from colocate_run.folder import RunFolder
from colocate_run.leaving import Notices
from colocate_run.lock import locked
from colocate_run.log import RunLog, tail_of
from colocate_run.logs import FOLDER as LOGS, WorkerLogs
from colocate_run.observing import LEAVING, RunObservers
from colocate_run.profiling import StepProfile, Wanted
from colocate_run.recorded import RecordedRoles
from colocate_run.run import Run
from colocate_run.screen import Screen, Unread
from colocate_run.stopping import Asked, StopSignals
from colocate_run.store import Store

if TYPE_CHECKING:
    from colocate.connecting import Runtime
    from colocate.driver import ColocatedGroup, GroupMemory

Resume: TypeAlias = Literal[False, True, "auto"]
"""Whether to resume the last complete checkpoint of the name; "auto": resume if there is one, else start anew."""


@attrs.define(eq=False)
class Begun:
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
    profile: Wanted | None = None
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
        self.environment = {**environment(), **origin()}

    def hear(self, runtime: Runtime) -> bool:
        """Write the output of a runtime's workers to the run's logs; return False if this was set up before."""
        return Driver(runtime).hear(self.logs.heard)

    @property
    def is_here(self) -> bool:
        """Whether this process began the run. A forked child of this process must not end the run."""
        return os.getpid() == self._process

    def ends_at_once(self, error: BaseException) -> bool:
        """Return whether the run ends without a report, after a job's second Ctrl-C or in a forked child.

        In a script's block the first Ctrl-C is reported.
        """
        return not self.is_here or (self.job is not None and isinstance(error, KeyboardInterrupt))


def begin(
    config: Config, log: RunLog, *, resume: Resume, screen: Screen, profile: Wanted | None = None
) -> AbstractContextManager[Begun]:
    """Create the folder of a config's run, or choose the folder to resume.

    In the returned block the log is written to that folder, and so is an error that ends the block.
    """
    if config.job is None:
        raise ConfigError(f"config {config.name!r} has no job to run; add one: `job: plugin.job`, or module:function")
    function = find_job(config.job.use).load()
    options = arguments_of(function, config.job.use, skip=1).built(config.job.with_)
    with contextlib.ExitStack() as stack:
        store = None if config.checkpoints is None else Store(config.checkpoints)
        folder, step, metrics = _folder(config.name, resume, screen, stack, store)
        folder.write("config.yaml", config.dump())
        plain, job = without_secrets(config.plain()), lambda run: function(run, **options)
        begun = Begun(config.name, folder, step, metrics, screen, plain, config.trace, job, store, profile)
        begun.recorded = RecordedRoles.of(config)
        return _in_its_folder(begun, log, config.observe, stack.pop_all().close)


def execute(
    begun: Begun, runtime: Runtime, groups: Mapping[str, ColocatedGroup], start_up: float, signals: StopSignals
) -> RunRecord:
    """Run a config's job, write the report, and return the record."""
    job = begun.job
    assert job is not None
    with _recording(begun, runtime, groups, signals, start_up) as run:
        _until_done(run, lambda: job(run))
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
    begun = Begun(folder.path.name, folder, None, [], screen, trace=trace)
    with (
        log.listening(),
        _in_its_folder(begun, log, observe),
        _recording(begun, runtime, runtime.groups, StopSignals(screen.stopping), 0.0) as run,
    ):
        yield run


@contextlib.contextmanager
def _in_its_folder(
    begun: Begun, log: RunLog, observe: Sequence[object], then: Callable[[], object] = lambda: None
) -> Iterator[Begun]:
    """A context manager that logs a run's output and error, notifies observers of the start, and closes the logs."""
    folder, screen, since = begun.folder, begun.screen, time.time()
    folder.remove("error.txt")
    log.open(folder.path / "log.txt")
    log.workers = begun.logs
    try:
        with screen.logging(log):
            begun.observers.add(observe)
            begun.observers.begin(RunInfo(begun.name, folder.path, begun.config, begun.step, begun.environment))
            yield begun
    except BaseException as error:
        if begun.ends_at_once(error) or (begun.started and _is_good(error)):
            raise
        text = told(error)
        log.write(text)
        try:
            folder.write("error.txt", text)
            for name, logged in ((isinstance(error, ClusterError) and error.logs) or {}).items():
                folder.write(f"engine-{name}", logged)
        except OSError as other:
            error.add_note(f"it could not be written to {folder.path / 'error.txt'}: {other}")
        if not begun.started:
            _failed(begun, lambda: _never_started(begun, since), error)
        raise
    finally:
        log.workers = None
        begun.logs.close()
        log.close()
        then()
        for name, fault in (("log.txt", log.fault), (f"{LOGS}/", begun.logs.fault)):
            if fault is not None:
                screen.say(f"{name} isn't whole: {fault}")


@contextlib.contextmanager
def _recording(
    begun: Begun, runtime: Runtime, groups: Mapping[str, ColocatedGroup], signals: StopSignals, start_up: float
) -> Iterator[Run]:
    """A context manager that counts a run's calls, then writes the report and notifies observers of the end."""
    begun.started = True
    name, folder, screen = begun.name, begun.folder, begun.screen
    driver = Driver(runtime)
    calls = CallLog(driver.slot_of)
    hears = begun.hear(runtime)
    devices = DeviceLog()
    observers = (calls, devices, *([begun.observers] if begun.observers else []))
    for observer in observers:
        runtime.observe(observer)
    # Report the groups that were spawned before the observers were added.
    for group in runtime.groups.values() if begun.observers else ():
        driver.soon(partial(begun.observers.colocate_group_spawned, group))
    started = time.time() - start_up
    resumed = None if begun.step is None else folder.checkpoints()[-1][1]
    notices = Notices(driver, partial(begun.observers.soon, driver, LEAVING))
    parts = folder, screen, signals, begun.metrics, begun.observers, notices, begun.store
    run = Run(name, runtime, groups, folder.path, resumed, *parts)
    driver.run = run

    def on_signal() -> None:
        driver.let_go()  # Resume stopped ranks, which would never finish the step.
        notices.on_signal()

    signals.then = on_signal
    recorded = partial(_record, begun, run, calls, devices, started, start_up)
    try:
        with (
            contextlib.closing(folder),
            window(runtime, folder.path.name),
            _devices_watched(driver),
            runtime.trace(folder.free("trace", ".json")) if begun.trace else contextlib.nullcontext(),
            screen.running(name, folder.path, begun.step),
            notices,
            begun.recorded.recording(runtime, groups, folder, run),
        ):
            try:
                if begun.profile is not None:
                    run._profile = StepProfile(begun.profile, driver, groups, screen.say)
                yield run
                run._checkpoints.settle()
                if run._profile is not None:
                    run._profile.close()
            except BaseException as error:
                if run._profile is not None and begun.is_here:
                    run._profile.drop()
                if not begun.ends_at_once(error):
                    run._checkpoints.settle_quietly(screen.say)
                raise
            finally:
                run._is_over = True
                driver.resumed = {}
    except BaseException as error:
        if begun.is_here and _is_good(error):
            _finish(begun, run, recorded)
        elif not begun.ends_at_once(error):
            _failed(begun, recorded, error)
        raise
    else:
        if begun.is_here:
            _finish(begun, run, recorded)
    finally:
        driver.run = None
        for observer in observers:
            driver.forget(observer)
        if hears:
            driver.hear(None)


@contextlib.contextmanager
def _devices_watched(driver: Driver) -> Iterator[None]:
    stop = driver.watch_devices()
    try:
        yield
    finally:
        stop()


def _until_done(run: Run, job: Callable[[], object]) -> None:
    """Run the job, and run the job again from the last checkpoint after each restart of a group.

    A job that calls `sys.exit()` or `sys.exit(0)` has ended well. So has a run that is asked to end during a restore or
    restart, because there is nothing to save.
    """
    back: str | None = None
    signals = run._signals
    try:
        while True:
            try:
                run._restore(back)
                signals.during = "a job"
                try:
                    job()
                except SystemExit as ended:
                    if not _is_good(ended):
                        raise
                run._checkpoints.settle()
                return
            except GroupRestarted as restarted:
                signals.during = "no job"
                run._restart(restarted)
                back = restarted.group
    except Asked:
        run.rewind()
    finally:
        signals.during = "the end"


def _is_good(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and not error.code))


def _finish(begun: Begun, run: Run, record: Callable[[], RunRecord]) -> None:
    run.record = record()
    with contextlib.suppress(Unread):  # In `colocate run FILE | head` nobody reads the whole output.
        begun.screen.finished(run.record)
    try:
        report = _report(run.record)
        with contextlib.suppress(Unread):
            begun.screen.reported(report)
    finally:
        begun.observers.end(run.record, None)


def _record(begun: Begun, run: Run, calls: CallLog, devices: DeviceLog, started: float, start_up: float) -> RunRecord:
    begun.observers.settle(Driver(run.runtime), run.directory)
    return RunRecord(
        name=run.name,
        directory=run.directory,
        config=config_text(run._folder.config()),
        metrics=tuple(run._metrics),
        tables=run._tables,
        totals=calls.totals(),
        spans=calls.spans(),
        phases=run._phases,
        tree=run.runtime.graph.render("tree"),
        graph=run.runtime.graph.render("json"),
        environment={**begun.environment, **environment()},
        started=started,
        seconds=time.time() - started,
        stopped=run._signals.received,
        start_up=start_up,
        memory=_memory(run),
        contention=calls.contention(),
        idle=calls.idle(started + start_up, time.time()),
        devices=devices.uses(),
        handed_over=calls.handed_over(),
        restarts=calls.restarts([started + start_up, *run._checkpoints.times]),
        log=tail_of(run.directory / "log.txt"),
    )


def _memory(run: Run) -> tuple[GroupMemory, ...]:
    memories: list[GroupMemory] = []
    deadline = Deadline(LEDGERS_WITHIN_S)
    for name, group in run.runtime.groups.items():
        if group.state != "ready":
            continue
        try:
            memory = group.memory(deadline.left)
        except (ColocateError, TimeoutError) as error:
            run._screen.say(f"what the memory of group {name!r} was used for isn't known: {error_text(error)}")
        else:
            memories += [memory] if any(role.total for slot in memory.slots for role in slot.roles) else []
    return tuple(memories)


def _never_started(begun: Begun, started: float) -> RunRecord:
    return RunRecord(
        name=begun.name,
        directory=begun.folder.path,
        config=config_text(begun.folder.config()),
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
        log=tail_of(begun.folder.path / "log.txt"),
    )


def _folder(
    name: str, resume: Resume, screen: Screen, stack: contextlib.ExitStack, store: Store | None
) -> tuple[RunFolder, int | None, list[Row]]:
    """Create or find a run's folder, and lock the folder; return the folder, and the step and rows to resume from."""
    root = Path("runs")
    if resume and store is not None:
        store.bring(name, root, screen.say)
    previous = _to_resume(name, root, resume) if resume else None
    claims = [] if store is None else [store.has]
    folder = previous or RunFolder.create(name, root, *claims, shared=resume == "auto")
    folder.check = stack.enter_context(locked(folder.path, screen.say)).check
    folder.tidy()
    if not (complete := folder.checkpoints()):
        folder.set_aside("metrics", ".jsonl")  # These rows are from an attempt without a checkpoint.
        return folder, None, []
    step, _ = complete[-1]
    return folder, step, [*folder.rewind(step)]


def _to_resume(name: str, root: Path, resume: Resume) -> RunFolder | None:
    """Return the folder to resume or to restart in; None if `resume` is "auto" and there is no earlier run."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is not None and not re.search(rf"(?<!\d){re.escape(task)}(?!\d)", name):
        raise ConfigError(
            f"this is task {task} of an array of jobs, in which all runs are called {name!r}: it might go on with "
            "another one's; give each its own, name: %s-${SLURM_ARRAY_TASK_ID}" % name
        )
    if resume == "auto":
        folders = RunFolder.of_name(name, root)
        return next((folder for folder in folders if folder.checkpoints()), folders[0] if folders else None)
    return RunFolder.latest(name, root)


def _report(record: RunRecord, error: str | None = None) -> Path:
    return colocate_report.write(record.directory, record, error=error)


def _failed(begun: Begun, record: Callable[[], RunRecord], error: BaseException) -> None:
    """Write the report of a failed run. If the report itself fails, only add a note to the run's error."""
    run_record = _never_started(begun, time.time())
    try:
        run_record = record()
        begun.screen.reported(_report(run_record, told(error).strip()))
    except Exception as other:
        error.add_note(f"its report could not be written: {type(other).__name__}: {other}")
    finally:
        begun.observers.end(run_record, error)
