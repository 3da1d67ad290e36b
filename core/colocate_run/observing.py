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
from colocate.texts import plural, shown, told
from colocate_report.record import RunInfo, RunRecord
from colocate_run.config.schema import ObserverConfig
from colocate_run.screen import Screen, short

if TYPE_CHECKING:
    from colocate.driver import Driver

_STARTED, LOGGED, _, LEAVING, _FINISHED = OF_RUNS
_log = logging.getLogger("colocate")


@attrs.define(eq=False)
class Guarded:
    """A wrapper that catches an observer's errors. After an error, the observer is notified only of the run's end."""

    name: str
    _observer: object
    _screen: Screen
    hook: str | None = attrs.field(default=None, init=False)  # The hook that is running now, if any.
    stopped: bool = attrs.field(default=False, init=False)  # Whether only the run's end will be reported.

    def begin(self, info: RunInfo) -> None:
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

    def tell(self, hook: str, *args: object) -> None:
        """Call a hook of the observer, unless the observer lacks the hook or has been stopped."""
        if self.has(hook) and not self.stopped:
            self.hook = hook
            try:
                self._call(hook, *args)
            finally:
                self.hook = None

    def end(self, record: RunRecord, error: BaseException | None) -> None:
        """Report the end of the run to the observer."""
        if self.has(_FINISHED):
            self._call(_FINISHED, record, error)

    def has(self, hook: str) -> bool:
        """Return whether the observer has a hook with this name."""
        return getattr(self._observer, hook, None) is not None

    def _call(self, hook: str, *args: object) -> None:
        try:
            getattr(self._observer, hook)(*args)
        except Exception as error:
            self.stopped = True
            more = "" if hook == _FINISHED else ", and is told nothing more but of the end"
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._screen.say(f"the observer {self.name!r} raised in {hook}{more}: {words}")
            self._screen.note(told(error))


@attrs.define(eq=False)
class RunObservers:
    """All observers of a run, which the runtime sees as one observer."""

    _screen: Screen
    _all: list[Guarded] = attrs.field(factory=list, init=False)
    _told: list[Guarded] = attrs.field(factory=list, init=False)

    def __bool__(self) -> bool:
        return bool(self._told)

    def __getattr__(self, hook: str) -> Callable[..., None]:
        if not hook.startswith("colocate_"):
            raise AttributeError(hook)
        return partial(self._tell, hook)

    def _tell(self, hook: str, *args: object) -> None:
        for observer in self._told:
            observer.tell(hook, *args)

    def add(self, observe: Sequence[object]) -> None:
        """Add observers, which are names, entries of the config, or observer objects."""
        if not isinstance(observe, Iterable):
            raise ConfigError(f"observe={shown(observe)} is no list of observers")
        for entry in [observe] if isinstance(observe, str) else observe:
            match entry:
                case str():
                    self._make(entry, {})
                case ObserverConfig():
                    self._make(entry.use, entry.with_)
                case {"use": str(name), "with": dict(options), **rest} if not rest:
                    self._make(name, options)
                case {"use": str(name), **rest} if not rest:
                    self._make(name, {})
                case Mapping():
                    raise ConfigError(f"observe: {dict(entry)!r}: write {{'use': name, 'with': {{...}}}}")
                case _:
                    check_observer(entry, "observe")
                    self._all.append(Guarded(type(entry).__name__, entry, self._screen))

    def _make(self, name: str, options: Mapping[str, Any]) -> None:
        plugin = find_observer(name)
        arguments = arguments_of(plugin.load(), name)
        if problems := list(arguments.problems(options)):
            mistakes = [
                Mistake(path_text(("with", *problem.place)), None, problem.message, problem.nearest)
                for problem in problems
            ]
            raise ConfigError(f"observe: {name}: {plural(len(problems), 'mistake')}", mistakes=mistakes)
        observer = plugin.make(arguments.built(options))
        check_observer(observer, f"observe: {name}")
        self._all.append(Guarded(name, observer, self._screen))

    def begin(self, info: RunInfo) -> None:
        """Report the run's start to all observers. Only observers that have received the start receive the end."""
        for observer in self._all:
            observer.begin(info)
            self._told.append(observer)

    def soon(self, driver: Driver, hook: str, *args: object) -> None:
        """Queue a call of a hook on all observers; events arrive in order."""
        if self._told:
            driver.soon(partial(self._tell, hook, *args))

    def settle(self, driver: Driver, directory: Path) -> None:
        """Wait until all events are delivered; warn of an observer or a callback that hangs."""
        if driver.settle():
            return
        slow = next((observer for observer in self._told if observer.hook is not None), None)
        for observer in self._told:
            observer.stopped = True
        # Closing the runtime doesn't wait for a hanging observer, because the run itself has ended well.
        if slow is not None:
            driver.give_up_while(lambda: slow.hook is not None)
        in_the_way = f"{slow.name!r} hasn't returned from {slow.hook}" if slow is not None else "a callback goes on"
        text = (
            f"run {short(directory)}, {TOLD_WITHIN_S:g} s after its end: its report lacks the last calls, and "
            f"observers haven't been told of all, because {in_the_way}"
        )
        _log.warning("%s; log.txt there has the stack, metrics.jsonl all that was logged", text)
        self._screen.note(f"{text}:\n{driver.stack}\n")

    def end(self, record: RunRecord, error: BaseException | None) -> None:
        """Report the end of the run to all observers."""
        for observer in self._told:
            observer.end(record, error)
