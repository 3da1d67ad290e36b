"""Call the observers of a run, from before the workers start until the report is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate.driver import OF_RUNS, TOLD_WITHIN_S, check_observer
from colocate.errors import ConfigError, Mistake, PluginError
from colocate.plugins import find_observer
from colocate.signatures import arguments_of, path_text
from colocate.texts import format_count, format_exception, format_value
from colocate_report.record import RunInfo, RunRecord
from colocate_run.config.schema import ObserverConfig
from colocate_run.screen import Screen, shorten_path

if TYPE_CHECKING:
    from colocate.driver import Driver

_STARTED, LOGGED, _, LEAVING, _FINISHED = OF_RUNS
_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class GuardedObserver:
    """A wrapper that catches an observer's errors. After an error, the observer is notified only of the run's end."""

    name: str
    _observer: object
    _screen: Screen
    hook: str | None = attrs.field(default=None, init=False)  # The hook that is running now, if any.
    is_stopped: bool = attrs.field(default=False, init=False)  # Whether only the run's end will be reported.

    def start_run(self, info: RunInfo) -> None:
        """Report the run's start. The run doesn't begin if the observer raises.

        Raises:
            PluginError: The observer has raised.
        """
        started = getattr(self._observer, _STARTED, None)
        if started is None:
            return
        try:
            started(info)
        except Exception as error:
            text = f"the observer {self.name!r} raised when it was told that the run starts: "
            raise PluginError(f"{text}{type(error).__name__}: {error}", name=self.name) from error

    def call_hook(self, hook: str, *args: object) -> None:
        """Call a hook of the observer, unless the observer lacks the hook or has been stopped."""
        if self.has_hook(hook) and not self.is_stopped:
            self.hook = hook
            try:
                self._run_hook(hook, *args)
            finally:
                self.hook = None

    def finish_run(self, record: RunRecord, error: BaseException | None) -> None:
        """Report the end of the run to the observer."""
        if self.has_hook(_FINISHED):
            self._run_hook(_FINISHED, record, error)

    def has_hook(self, hook: str) -> bool:
        """Return whether the observer has a hook with this name."""
        return getattr(self._observer, hook, None) is not None

    def _run_hook(self, hook: str, *args: object) -> None:
        try:
            getattr(self._observer, hook)(*args)
        except Exception as error:
            self.is_stopped = True
            more = "" if hook == _FINISHED else ", and is told nothing more but of the end"
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._screen.print_text(f"the observer {self.name!r} raised in {hook}{more}: {words}")
            self._screen.log_text(format_exception(error))


@attrs.define(eq=False)
class RunObservers:
    """All observers of a run, which the runtime sees as one observer."""

    _screen: Screen
    _observers: list[GuardedObserver] = attrs.field(factory=list, init=False)
    _started: list[GuardedObserver] = attrs.field(factory=list, init=False)

    def __bool__(self) -> bool:
        return bool(self._started)

    def __getattr__(self, hook: str) -> Callable[..., None]:
        if not hook.startswith("colocate_"):
            raise AttributeError(hook)
        return partial(self._notify, hook)

    def _notify(self, hook: str, *args: object) -> None:
        for observer in self._started:
            observer.call_hook(hook, *args)

    def add_observers(self, observe: Sequence[object]) -> None:
        """Add observers, which are names, entries of the config, or observer objects."""
        if not isinstance(observe, Iterable):
            raise ConfigError(f"observe={format_value(observe)} is no list of observers")
        for entry in [observe] if isinstance(observe, str) else observe:
            match entry:
                case str():
                    self._add_plugin(entry, {})
                case ObserverConfig():
                    self._add_plugin(entry.use, entry.with_)
                case {"use": str(name), "with": dict(options), **rest} if not rest:
                    self._add_plugin(name, options)
                case {"use": str(name), **rest} if not rest:
                    self._add_plugin(name, {})
                case Mapping():
                    raise ConfigError(f"observe: {dict(entry)!r}: write {{'use': name, 'with': {{...}}}}")
                case _:
                    check_observer(entry, "observe")
                    self._observers.append(GuardedObserver(type(entry).__name__, entry, self._screen))

    def _add_plugin(self, name: str, options: Mapping[str, Any]) -> None:
        plugin = find_observer(name)
        arguments = arguments_of(plugin.load(), name)
        if problems := list(arguments.problems(options)):
            mistakes = [
                Mistake(path_text(("with", *problem.place)), None, problem.message, problem.nearest)
                for problem in problems
            ]
            raise ConfigError(f"observe: {name}: {format_count(len(problems), 'mistake')}", mistakes=mistakes)
        observer = plugin.make(arguments.convert(options))
        check_observer(observer, f"observe: {name}")
        self._observers.append(GuardedObserver(name, observer, self._screen))

    def start_run(self, info: RunInfo) -> None:
        """Report the run's start to all observers. Only observers that have received the start receive the end."""
        for observer in self._observers:
            observer.start_run(info)
            self._started.append(observer)

    def notify_later(self, driver: Driver, hook: str, *args: object) -> None:
        """Queue a call of a hook on all observers; events arrive in order."""
        if self._started:
            driver.call_soon(partial(self._notify, hook, *args))

    def wait_delivered(self, driver: Driver, directory: Path) -> None:
        """Wait until all events are delivered; warn of an observer or a callback that hangs."""
        if driver.flush_observers():
            return
        slow = next((observer for observer in self._started if observer.hook is not None), None)
        for observer in self._started:
            observer.is_stopped = True
        # Let the runtime close without waiting for the hanging observer, because the run itself has ended well.
        if slow is not None:
            driver.set_hang_check(lambda: slow.hook is not None)
        in_the_way = f"{slow.name!r} hasn't returned from {slow.hook}" if slow is not None else "a callback goes on"
        text = (
            f"run {shorten_path(directory)}, {TOLD_WITHIN_S:g} s after its end: its report lacks the last calls, and "
            f"observers haven't been told of all, because {in_the_way}"
        )
        _log.warning("%s; log.txt there has the stack, metrics.jsonl all that was logged", text)
        self._screen.log_text(f"{text}:\n{driver.stack}\n")

    def finish_run(self, record: RunRecord, error: BaseException | None) -> None:
        """Report the end of the run to all observers."""
        for observer in self._started:
            observer.finish_run(record, error)
