"""Who is told of a run: observers that its config names, from before its workers start until its report is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from colocate._plugins.plugins import find_observer
from colocate._runs.record import LogRecord, RunInfo, RunRecord
from colocate._system.tracebacks import told
from colocate.config.schema import ObserverConfig
from colocate.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from colocate._job.screen import Screen


@attrs.define(eq=False)
class Guarded:
    """An observer that can't harm the run: it hears nothing more once it has raised, which is said once."""

    _name: str
    _observer: object
    _screen: Screen

    def __getattr__(self, hook: str) -> Callable[..., object]:
        function = getattr(self._observer, hook)

        def call(*args: object) -> None:
            if self._observer is not None:
                try:
                    function(*args)
                except Exception as error:
                    self._fell_silent(hook, error)

        return call

    def begin(self, info: RunInfo) -> None:
        """Tell it of the run, which doesn't begin if it can't hear of that.

        Raises:
            PluginError: It raised.
        """
        started = getattr(self._observer, "colocate_run_started", None)
        if started is None:
            return
        try:
            started(info)
        except Exception as error:
            text = f"the observer {self._name!r} raised when it was told that the run starts: "
            raise PluginError(f"{text}{type(error).__name__}: {error}", name=self._name) from error

    def logged(self, record: LogRecord) -> None:
        """Tell it what was logged."""
        self._tell("colocate_run_logged", record)

    def end(self, record: RunRecord, error: BaseException | None) -> None:
        """Tell it that the run is over."""
        self._tell("colocate_run_finished", record, error)

    def _tell(self, hook: str, *args: object) -> None:
        function: Callable[..., object] | None = getattr(self, hook, None)
        if function is not None:
            function(*args)

    def _fell_silent(self, hook: str, error: Exception) -> None:
        self._observer = None
        words = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._screen.say(f"the observer {self._name!r} raised in {hook}, and is told nothing more: {words}")
        self._screen.note(told(error))


@attrs.define(eq=False)
class RunObservers:
    """All of a run."""

    _screen: Screen
    _all: list[Guarded] = attrs.field(factory=list, init=False)
    _told: list[Guarded] = attrs.field(factory=list, init=False)

    def __bool__(self) -> bool:
        return bool(self._told)

    def __iter__(self) -> Iterator[Guarded]:
        return iter(self._told)

    def add(self, observe: Sequence[object]) -> None:
        """Make those that a config names: by name, as an entry of the config, or the observer itself.

        Raises:
            ConfigError: An entry isn't one.
            PluginError: One is unknown, or can't be made.
        """
        for each in [observe] if isinstance(observe, str) else observe:
            match each:
                case str():
                    self._make(each, {})
                case ObserverConfig():
                    self._make(each.use, each.with_)
                case {"use": str(name), "with": dict(options), **rest} if not rest:
                    self._make(name, options)
                case {"use": str(name), **rest} if not rest:
                    self._make(name, {})
                case Mapping():
                    raise ConfigError(f"observe: {dict(each)!r}: write {{'use': name, 'with': {{...}}}}")
                case _:
                    self._all.append(Guarded(type(each).__name__, each, self._screen))

    def _make(self, name: str, options: Mapping[str, Any]) -> None:
        self._all.append(Guarded(name, find_observer(name).make(options), self._screen))

    def begin(self, info: RunInfo) -> None:
        """Tell them of the run. Only those that have heard of it are told of its end.

        Raises:
            PluginError: One of them raised.
        """
        for each in self._all:
            each.begin(info)
            self._told.append(each)

    def logged(self, record: LogRecord) -> None:
        """Tell them what was logged."""
        for each in self._told:
            each.logged(record)

    def end(self, record: RunRecord, error: BaseException | None) -> None:
        """Tell them that it is over, and how."""
        for each in self._told:
            each.end(record, error)
