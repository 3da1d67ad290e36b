"""Plugins by name: listed from metadata alone, and imported only when a name needs them.

A plugin is an entry point of the group `colocate.executors`, `colocate.roles`, `colocate.observers` or
`colocate.engines`; its object (mostly a module) implements hooks marked with `@colocate.hookimpl`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from colocate._plugins.entry_points import (
    RAISED,
    PluginGroup,
    distribution_of,
    entry_error,
    hookspec,
    import_reference,
    listed,
    needed_by_extra,
    origin,
    raise_broken,
    unknown_plugin,
    versions_of,
)
from colocate._system.nearest import did_you_mean
from colocate._system.tracebacks import fold_frames_of
from colocate.errors import PluginError

if TYPE_CHECKING:
    from colocate.executor import About, Executor


class ExecutorHooks:
    """Hooks of entry points in the group `colocate.executors`; the entry's name is the executor's."""

    @hookspec
    def colocate_executor(self) -> type[Executor]:
        """The executor's class."""
        raise NotImplementedError

    @hookspec
    def colocate_about(self) -> About:
        """Return what there is to say of it as long as it isn't imported; may be left out."""
        raise NotImplementedError


class RoleHooks:
    """Hooks of entry points in the group `colocate.roles`; the entry's name is the namespace, as in `acme.reward`."""

    @hookspec
    def colocate_roles(self) -> Mapping[str, type | str]:
        """Roles by name: classes, or "module:Class" so that listing them imports nothing."""
        raise NotImplementedError

    @hookspec
    def colocate_jobs(self) -> Mapping[str, Callable[..., Any] | str]:
        """Jobs by name: functions `job(run, **options)`, or "module:function"."""
        raise NotImplementedError


class ObserverHooks:
    """Hooks of entry points in the group `colocate.observers`; the entry's name is the observer's."""

    @hookspec
    def colocate_observer(self) -> Callable[..., object]:
        """Return what makes the observer: its class. The options of the config are its arguments."""
        raise NotImplementedError


class EngineHooks:
    """Hooks of entry points in the group `colocate.engines`; the entry's name is the engine's."""

    @hookspec
    def colocate_engine(self) -> type | str:
        """The engine's class, or "module:Class"; see `colocate_rollout.Engine`."""
        raise NotImplementedError


_EXECUTORS = PluginGroup("colocate.executors", "executor", ExecutorHooks)
_ROLES = PluginGroup("colocate.roles", "role plugin", RoleHooks)
_OBSERVERS = PluginGroup("colocate.observers", "observer", ObserverHooks)
_ENGINES = PluginGroup("colocate.engines", "engine", EngineHooks)


@attrs.frozen
class PluginInfo:
    """A plugin as its metadata says, unimported.

    Attributes:
        kind: "executor", "roles", "observer" or "engine".
        name: The name it is used by.
        distribution: The distribution it comes from.
        version: That distribution's version.
        value: The object that the entry point names.
        origin: The distribution with its version, or why it doesn't tell.
        rivals: Other distributions that claim the same name; as long as there are any, using it is an error.
    """

    kind: str
    name: str
    distribution: str | None
    version: str | None
    value: str
    origin: str
    rivals: tuple[str, ...] = ()

    @property
    def brings(self) -> str:
        """Return what it brings, in words."""
        return "roles, jobs" if self.kind == "roles" else self.kind

    def needed(self) -> Mapping[str, str | None]:
        """The distributions of the extra that is named like it, with the installed version; None where it isn't."""
        return needed_by_extra(self.distribution, self.name) if self.distribution else {}

    def engine(self) -> Mapping[str, str | None]:
        """The distributions of an executor's engine, as far as it says, with their versions; None where one lacks."""
        about = about_executor(self.name)
        return versions_of(about.distributions) if about is not None and about.distributions else self.needed()

    def fault(self) -> PluginError | None:
        """Import it with all that it brings, and say what is wrong first; None when it works."""
        try:
            if self.kind == "executor":
                find_executor(self.name)
            elif self.kind == "observer":
                find_observer(self.name).load()
            elif self.kind == "engine":
                find_engine(self.name).load()
            else:
                for role in roles_of(self.name):
                    role.load()
                for job in jobs_of(self.name):
                    job.load()
        except PluginError as error:
            return error
        return None


@attrs.frozen
class _Found:
    """What a name stands for, not yet imported.

    Attributes:
        name: The name it was found by.
        target: What it is, or "module:name".
        distribution: The distribution it comes from; None for a module of the user's own.
        version: That distribution's version.
    """

    _noun: ClassVar[str]
    name: str
    target: Any
    distribution: str | None = None
    version: str | None = None
    _entry: EntryPoint | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def origin(self) -> str:
        """Where it comes from: a distribution with its version, or a module."""
        if self._entry is None:
            return f"module {str(self.target).partition(':')[0]}"
        return origin(self._entry)

    @property
    def _what(self) -> str:
        return f"{self._noun} {self.name!r}" if self._entry is None else f"{self._noun} {self.name!r} ({self.origin})"

    def _error(self, message: str) -> PluginError:
        return PluginError(f"{self._what}{message}", name=self.name, distribution=self.distribution)

    def load(self) -> Callable[..., Any]:
        """Import it, or raise PluginError where it can't be called (a role: is no class, or has no method)."""
        is_name = isinstance(self.target, str)
        found = import_reference(self.target, self._what, self._entry) if is_name else self.target
        if not callable(found):
            raise self._error(f" is {found!r}, which can't be called")
        function: Callable[..., Any] = found
        return function


@attrs.frozen
class FoundRole(_Found):
    """The role that a name stands for."""

    _noun = "role"

    def load(self) -> type:
        """Import the class; see the base."""
        from colocate._role.role import methods_of

        is_name = isinstance(self.target, str)
        found = import_reference(self.target, self._what, self._entry) if is_name else self.target
        if not isinstance(found, type):
            raise self._error(f" is {found!r}, which is not a class")
        if not methods_of(found):
            where = f"{found.__module__}.{found.__qualname__}"
            raise self._error(f": {where} has no role methods; decorate at least one with @colocate.method")
        return found


@attrs.frozen
class FoundJob(_Found):
    """The job that a name stands for."""

    _noun = "job"

    def load(self) -> Callable[..., Any]:
        """Import it; see the base."""
        function = super().load()
        if inspect.iscoroutinefunction(function):
            raise self._error(" is an async function, and a job is a plain one: have it call asyncio.run(...) on that")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise self._error(" has a `yield`, so calling it runs nothing of it: a job is a plain function")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some written in C have no signature
            return function
        takes = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if not any(each.kind in takes for each in parameters):
            raise self._error(" has no first parameter for the run: a job is called as job(run, **options)")
        return function


@attrs.frozen
class FoundObserver(_Found):
    """The observer that a name stands for."""

    _noun = "observer"

    def make(self, options: Mapping[str, Any]) -> object:
        """Make one, or raise PluginError."""
        factory = self.load()
        try:
            return factory(**options)
        except RAISED as error:
            raise_broken(f"{self._what}:", "could not be made", error, self._entry)


@attrs.frozen
class FoundEngine(_Found):
    """The engine that a name stands for."""

    _noun = "engine"


_F = TypeVar("_F", FoundRole, FoundJob)


def find_executor(name: str) -> type[Executor]:
    """Return the executor class of this name, or raise PluginError; imports the plugin that has it only."""
    from colocate.executor import Executor

    entry = _EXECUTORS.find(name)
    found = _EXECUTORS.call(entry, "colocate_executor")
    if (about := about_executor(name)) is not None:
        fold_frames_of(about.packages)
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise _wrong_return(entry, "colocate_executor", found, "a subclass of colocate.executor.Executor")
    what = f"the executor {name!r} ({origin(entry)}): its class {found.__qualname__}"
    if not isinstance(getattr(found, "name", None), str):
        raise entry_error(entry, f"{what} doesn't say what it is called: write name = {name!r} in it")
    lacking = [f"{duty}()" for duty in sorted(found.__abstractmethods__)]
    makes_itself = found.connect.__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    if lacking and makes_itself:  # one that picks a variant needn't be whole
        raise entry_error(entry, f"{what} lacks {listed(lacking)}, which are duties of an executor")
    return found


def about_executor(name: str) -> About | None:
    """Return what the executor of this name says of itself without being imported; None when it says nothing.

    Nor is anything said by one that is claimed twice, or whose plugin doesn't work: whoever uses it is told why.
    """
    from colocate.executor import About

    try:
        found = _EXECUTORS.call(_EXECUTORS.find(name), "colocate_about")
    except PluginError:
        return None
    return found if isinstance(found, About) else None


def abouts() -> Iterator[tuple[PluginInfo, About]]:
    """The executors that say something of themselves without being imported."""
    for plugin in plugins():
        if plugin.kind == "executor" and (about := about_executor(plugin.name)) is not None:
            yield plugin, about


def find_role(name: str) -> FoundRole:
    """Return the role of this name, `plugin.role` or `module:Class`. Imports the plugin, but not the role's module."""
    return _find(name, "role", "colocate_roles", FoundRole)


def find_job(name: str) -> FoundJob:
    """Return the job of this name, `plugin.job` or `module:function`. Imports the plugin, but not the job's module."""
    return _find(name, "job", "colocate_jobs", FoundJob)


def find_observer(name: str) -> FoundObserver:
    """Return the observer of this name, or of `module:Class`. Imports the plugin that has it, and no other."""
    if ":" in name:
        return FoundObserver(name, name)
    entry = _OBSERVERS.find(name)
    found = _OBSERVERS.call(entry, "colocate_observer")
    if not callable(found):
        raise _wrong_return(entry, "colocate_observer", found, "a class of observers")
    return FoundObserver(name, found, *distribution_of(entry), entry)


def find_engine(name: str) -> FoundEngine:
    """Return the engine of this name, or of `module:Class`. Imports the plugin that has it, and no other."""
    if ":" in name:
        return FoundEngine(name, name)
    entry = _ENGINES.find(name)
    found = _ENGINES.call(entry, "colocate_engine")
    if not callable(found) and not (isinstance(found, str) and all(found.partition(":"))):
        raise _wrong_return(entry, "colocate_engine", found, 'a class of engines, or "module:Class"')
    return FoundEngine(name, found, *distribution_of(entry), entry)


def plugins() -> list[PluginInfo]:
    """Return all plugins there are, by metadata: nothing is imported."""
    found = []
    groups = ((_EXECUTORS, "executor"), (_ROLES, "roles"), (_OBSERVERS, "observer"), (_ENGINES, "engine"))
    for group, kind in groups:
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in group.entries():
            by_name.setdefault(entry.name, []).append(entry)
        for name, (first, *rivals) in by_name.items():
            names = tuple(origin(rival) for rival in rivals)
            found.append(PluginInfo(kind, name, *distribution_of(first), first.value, origin(first), names))
    return found


def plugins_named(name: str) -> list[PluginInfo]:
    """Return the plugins of a name: an executor, one that brings roles and jobs, an observer, an engine, or several."""
    found = plugins()
    named = [plugin for plugin in found if plugin.name == name]
    if not named:
        namespace = name.partition(".")[0]
        if any(plugin.name == namespace and plugin.kind == "roles" for plugin in found):
            what = f"{name!r} is not a plugin's name but what one brings: `colocate plugins {namespace}` shows it"
            raise PluginError(what, name=name)
        raise unknown_plugin("plugin", name, sorted({plugin.name for plugin in found}))
    return named


def roles_of(namespace: str) -> list[FoundRole]:
    """Return the roles of a plugin. Imports the plugin, but not yet their modules."""
    return _all_of(namespace, "colocate_roles", FoundRole)


def jobs_of(namespace: str) -> list[FoundJob]:
    """Return the jobs of a plugin. Imports the plugin, but not yet their modules."""
    return _all_of(namespace, "colocate_jobs", FoundJob)


def _all_of(namespace: str, hook: str, kind: type[_F]) -> list[_F]:
    entry = _ROLES.find(namespace)
    known = _offered(entry, hook) or {}
    return [kind(f"{namespace}.{short}", target, *distribution_of(entry), entry) for short, target in known.items()]


def _offered(entry: EntryPoint, hook: str) -> Mapping[str, Any] | None:
    """Return what a plugin has by name; None when it has no such hook."""
    if (known := _ROLES.call(entry, hook, _ROLES)) is _ROLES:
        return None
    if not isinstance(known, Mapping) or not all(isinstance(key, str) for key in known):
        raise _wrong_return(entry, hook, known, 'a dict of names to objects or "module:Name"')
    for key, value in known.items():
        if isinstance(value, str) and not all(value.partition(":")):
            raise _wrong_return(entry, hook, {key: value}, '"module:Name" where it gives text')
    return known


def _find(name: str, noun: str, hook: str, kind: type[_F]) -> _F:
    if ":" in name:
        return kind(name, name)
    namespace, _, short = name.partition(".")
    if not short:
        raise PluginError(f"{name!r} is not a {noun}'s name: write plugin.{noun}, or module:Name", name=name)
    try:
        entry = _ROLES.find(namespace)
    except PluginError as error:
        if error.distribution is None:
            raise PluginError(error.message + _colon(name), name=error.name, hint=error.hint) from None
        raise
    known = _offered(entry, hook)
    if known is None:
        raise entry_error(entry, f"the role plugin {namespace!r} ({origin(entry)}) has no {noun}s: no hook {hook}()")
    if short not in known:
        there = f"it has {listed([repr(each) for each in sorted(known)])}" if known else "it has none"
        hint = _colon(name) or did_you_mean(short, known)
        message = f"{namespace!r} ({origin(entry)}) has no {noun} {short!r}: {there}{hint}"
        raise entry_error(entry, message)
    return kind(name, known[short], *distribution_of(entry), entry)


def _colon(name: str) -> str:
    """Return what to write where a class of a module was named with a dot; nothing where it doesn't look like one."""
    module, _, attribute = name.rpartition(".")
    return f"; a class of a module is named with a colon: {module}:{attribute}" if attribute[:1].isupper() else ""


def _wrong_return(entry: EntryPoint, hook: str, found: Any, wanted: str) -> PluginError:
    what = "nothing" if found is None else f"{found!r} ({type(found).__name__})"
    return entry_error(entry, f"{entry.name!r} ({origin(entry)}): its hook {hook}() returned {what}, not {wanted}")
