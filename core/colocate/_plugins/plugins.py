"""Find plugins by name. Plugins are listed from metadata alone, and imported only on use.

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
    describe_origin,
    distribution_of,
    entry_error,
    hookspec,
    import_reference,
    join_words,
    needed_by_extra,
    raise_broken,
    unknown_plugin,
    versions_of,
)
from colocate._system.nearest import did_you_mean
from colocate._system.tracebacks import add_folded_packages
from colocate.errors import PluginError

if TYPE_CHECKING:
    from colocate.executor import About, Executor


class ExecutorHooks:
    """The hooks of a plugin in the entry-point group `colocate.executors`. The entry point has the executor's name."""

    @hookspec
    def colocate_executor(self) -> type[Executor]:
        """Return the executor's class."""
        raise NotImplementedError

    @hookspec
    def colocate_about(self) -> About:
        """Return a description of the executor, for use without the class's import. This hook is optional."""
        raise NotImplementedError


class RoleHooks:
    """The hooks of a plugin in the entry-point group `colocate.roles`.

    The entry point's name is the namespace of the roles and jobs, as in `acme.reward`.
    """

    @hookspec
    def colocate_roles(self) -> Mapping[str, type | str]:
        """Return roles by name: each a class, or "module:Class", which is imported only on use."""
        raise NotImplementedError

    @hookspec
    def colocate_jobs(self) -> Mapping[str, Callable[..., Any] | str]:
        """Return jobs by name: each a function `job(run, **options)`, or "module:function"."""
        raise NotImplementedError


class ObserverHooks:
    """The hooks of a plugin in the entry-point group `colocate.observers`. The entry point has the observer's name."""

    @hookspec
    def colocate_observer(self) -> Callable[..., object]:
        """Return the observer's class, or a factory. A config's options are passed as keyword arguments."""
        raise NotImplementedError


class EngineHooks:
    """The hooks of a plugin in the entry-point group `colocate.engines`. The entry point has the engine's name."""

    @hookspec
    def colocate_engine(self) -> type | str:
        """Return the engine's class, or "module:Class"; see `colocate_rollout.Engine`."""
        raise NotImplementedError


_EXECUTORS = PluginGroup("colocate.executors", "executor", ExecutorHooks)
_ROLES = PluginGroup("colocate.roles", "role plugin", RoleHooks)
_OBSERVERS = PluginGroup("colocate.observers", "observer", ObserverHooks)
_ENGINES = PluginGroup("colocate.engines", "engine", EngineHooks)


@attrs.frozen
class PluginInfo:
    """A description of an installed plugin, from metadata alone.

    Attributes:
        kind: "executor", "roles", "observer" or "engine".
        name: The plugin's name.
        distribution: The plugin's distribution.
        version: The distribution's version.
        value: The object that the entry point names.
        origin: The distribution with its version, or why these are unknown.
        rivals: Other distributions that claim the same name; using a claimed name is an error.
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
        """The plugin's contents in words, for example "roles, jobs"."""
        return "roles, jobs" if self.kind == "roles" else self.kind

    def needed(self) -> Mapping[str, str | None]:
        """Return installed versions of the distributions that the plugin's extra requires; None for a missing one."""
        return needed_by_extra(self.distribution, self.name) if self.distribution else {}

    def engine(self) -> Mapping[str, str | None]:
        """Return installed versions of the distributions that an executor uses, such as ray; None for a missing one."""
        about = about_executor(self.name)
        return versions_of(about.distributions) if about is not None and about.distributions else self.needed()

    def fault(self) -> PluginError | None:
        """Import the plugin with all roles and jobs; return the first error, or None."""
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
class _PluginTarget:
    """The object that a name stands for, such as a role, perhaps not yet imported.

    Attributes:
        name: The name.
        target: The object, or "module:name".
        distribution: The distribution; None for a user's own module.
        version: The distribution's version.
    """

    _noun: ClassVar[str]
    name: str
    target: Any
    distribution: str | None = None
    version: str | None = None
    _entry: EntryPoint | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def origin(self) -> str:
        """The source of the target, in words: a distribution with the version, or a module."""
        if self._entry is None:
            return f"module {str(self.target).partition(':')[0]}"
        return describe_origin(self._entry)

    @property
    def _label(self) -> str:
        return f"{self._noun} {self.name!r}" if self._entry is None else f"{self._noun} {self.name!r} ({self.origin})"

    def _error(self, message: str) -> PluginError:
        return PluginError(f"{self._label}{message}", name=self.name, distribution=self.distribution)

    def load(self) -> Callable[..., Any]:
        """Import and return the target. Raise PluginError if the target isn't callable, or no valid role or job."""
        is_name = isinstance(self.target, str)
        target = import_reference(self.target, self._label, self._entry) if is_name else self.target
        if not callable(target):
            raise self._error(f" is {target!r}, which can't be called")
        function: Callable[..., Any] = target
        return function


@attrs.frozen
class FoundRole(_PluginTarget):
    """A role found by name."""

    _noun = "role"

    def load(self) -> type:
        from colocate._role.role import methods_of

        is_name = isinstance(self.target, str)
        target = import_reference(self.target, self._label, self._entry) if is_name else self.target
        if not isinstance(target, type):
            raise self._error(f" is {target!r}, which is not a class")
        if not methods_of(target):
            where = f"{target.__module__}.{target.__qualname__}"
            raise self._error(f": {where} has no role methods; decorate at least one with @colocate.method")
        return target


@attrs.frozen
class FoundJob(_PluginTarget):
    """A job found by name."""

    _noun = "job"

    def load(self) -> Callable[..., Any]:
        function = super().load()
        if inspect.iscoroutinefunction(function):
            raise self._error(" is an async function, and a job is a plain one: have it call asyncio.run(...) on that")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise self._error(" has a `yield`, so calling it runs nothing of it: a job is a plain function")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # Some functions written in C have no signature.
            return function
        takes = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if not any(parameter.kind in takes for parameter in parameters):
            raise self._error(" has no first parameter for the run: a job is called as job(run, **options)")
        return function


@attrs.frozen
class FoundObserver(_PluginTarget):
    """An observer found by name."""

    _noun = "observer"

    def make(self, options: Mapping[str, Any]) -> object:
        """Create the observer with options, or raise PluginError."""
        factory = self.load()
        try:
            return factory(**options)
        except RAISED as error:
            raise_broken(f"{self._label}:", "could not be made", error, self._entry)


@attrs.frozen
class FoundEngine(_PluginTarget):
    """An engine found by name."""

    _noun = "engine"


_F = TypeVar("_F", FoundRole, FoundJob)


def find_executor(name: str) -> type[Executor]:
    """Return the executor class of this name, or raise PluginError. Imports only the plugin of this name."""
    from colocate.executor import Executor

    entry = _EXECUTORS.find(name)
    executor_class = _EXECUTORS.call_hook(entry, "colocate_executor")
    if (about := about_executor(name)) is not None:
        add_folded_packages(about.packages)
    if not (isinstance(executor_class, type) and issubclass(executor_class, Executor)):
        raise _wrong_return(entry, "colocate_executor", executor_class, "a subclass of colocate.executor.Executor")
    label = f"the executor {name!r} ({describe_origin(entry)}): its class {executor_class.__qualname__}"
    if not isinstance(getattr(executor_class, "name", None), str):
        raise entry_error(entry, f"{label} doesn't say what it is called: write name = {name!r} in it")
    lacking = [f"{duty}()" for duty in sorted(executor_class.__abstractmethods__)]
    makes_itself = executor_class.connect.__func__ is Executor.connect.__func__  # type: ignore[attr-defined]
    if lacking and makes_itself:  # A class whose `connect` picks a variant may be abstract.
        raise entry_error(entry, f"{label} lacks {join_words(lacking)}, which are duties of an executor")
    return executor_class


def about_executor(name: str) -> About | None:
    """Return the description of an executor without importing the class; None for an undescribed executor.

    A plugin that is broken, or claimed twice, has no description: users of the executor get the error.
    """
    from colocate.executor import About

    try:
        about = _EXECUTORS.call_hook(_EXECUTORS.find(name), "colocate_about")
    except PluginError:
        return None
    return about if isinstance(about, About) else None


def abouts() -> Iterator[tuple[PluginInfo, About]]:
    """Yield each installed executor that has a description, with the description."""
    for plugin in plugins():
        if plugin.kind == "executor" and (about := about_executor(plugin.name)) is not None:
            yield plugin, about


def find_role(name: str) -> FoundRole:
    """Return the role of this name, `plugin.role` or `module:Class`. Imports the plugin, but not the role's module."""
    return _find_target(name, "role", "colocate_roles", FoundRole)


def find_job(name: str) -> FoundJob:
    """Return the job of this name, `plugin.job` or `module:function`. Imports the plugin, but not the job's module."""
    return _find_target(name, "job", "colocate_jobs", FoundJob)


def find_observer(name: str) -> FoundObserver:
    """Return the observer of this name, or the observer `module:Class`. Imports only the plugin of this name."""
    if ":" in name:
        return FoundObserver(name, name)
    entry = _OBSERVERS.find(name)
    factory = _OBSERVERS.call_hook(entry, "colocate_observer")
    if not callable(factory):
        raise _wrong_return(entry, "colocate_observer", factory, "a class of observers")
    return FoundObserver(name, factory, *distribution_of(entry), entry)


def find_engine(name: str) -> FoundEngine:
    """Return the engine of this name, or the engine `module:Class`. Imports only the plugin of this name."""
    if ":" in name:
        return FoundEngine(name, name)
    entry = _ENGINES.find(name)
    engine = _ENGINES.call_hook(entry, "colocate_engine")
    if not callable(engine) and not (isinstance(engine, str) and all(engine.partition(":"))):
        raise _wrong_return(entry, "colocate_engine", engine, 'a class of engines, or "module:Class"')
    return FoundEngine(name, engine, *distribution_of(entry), entry)


def plugins() -> list[PluginInfo]:
    """Return all installed plugins, found by metadata without an import."""
    infos = []
    groups = ((_EXECUTORS, "executor"), (_ROLES, "roles"), (_OBSERVERS, "observer"), (_ENGINES, "engine"))
    for group, kind in groups:
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in group.entries():
            by_name.setdefault(entry.name, []).append(entry)
        for name, (first, *rivals) in by_name.items():
            names = tuple(describe_origin(rival) for rival in rivals)
            infos.append(PluginInfo(kind, name, *distribution_of(first), first.value, describe_origin(first), names))
    return infos


def plugins_named(name: str) -> list[PluginInfo]:
    """Return all plugins with this name, of any kind; raise PluginError if there are none."""
    infos = plugins()
    named = [plugin for plugin in infos if plugin.name == name]
    if not named:
        namespace = name.partition(".")[0]
        if any(plugin.name == namespace and plugin.kind == "roles" for plugin in infos):
            message = f"{name!r} is not a plugin's name but what one brings: `colocate plugins {namespace}` shows it"
            raise PluginError(message, name=name)
        raise unknown_plugin("plugin", name, sorted({plugin.name for plugin in infos}))
    return named


def roles_of(namespace: str) -> list[FoundRole]:
    """Return the roles of a plugin. Imports the plugin, but not the roles' modules."""
    return _list_targets(namespace, "colocate_roles", FoundRole)


def jobs_of(namespace: str) -> list[FoundJob]:
    """Return the jobs of a plugin. Imports the plugin, but not the jobs' modules."""
    return _list_targets(namespace, "colocate_jobs", FoundJob)


def _list_targets(namespace: str, hook: str, kind: type[_F]) -> list[_F]:
    entry = _ROLES.find(namespace)
    targets = _call_target_hook(entry, hook) or {}
    return [kind(f"{namespace}.{short}", target, *distribution_of(entry), entry) for short, target in targets.items()]


def _call_target_hook(entry: EntryPoint, hook: str) -> Mapping[str, Any] | None:
    """Return the roles or jobs that a plugin's hook returns, by name; None if the plugin lacks the hook."""
    if (targets := _ROLES.call_hook(entry, hook, _ROLES)) is _ROLES:
        return None
    if not isinstance(targets, Mapping) or not all(isinstance(key, str) for key in targets):
        raise _wrong_return(entry, hook, targets, 'a dict of names to objects or "module:Name"')
    for key, value in targets.items():
        if isinstance(value, str) and not all(value.partition(":")):
            raise _wrong_return(entry, hook, {key: value}, '"module:Name" where it gives text')
    return targets


def _find_target(name: str, noun: str, hook: str, kind: type[_F]) -> _F:
    if ":" in name:
        return kind(name, name)
    namespace, _, short = name.partition(".")
    if not short:
        raise PluginError(f"{name!r} is not a {noun}'s name: write plugin.{noun}, or module:Name", name=name)
    try:
        entry = _ROLES.find(namespace)
    except PluginError as error:
        if error.distribution is None:
            raise PluginError(error.message + _colon_hint(name), name=error.name, hint=error.hint) from None
        raise
    targets = _call_target_hook(entry, hook)
    if targets is None:
        raise entry_error(
            entry, f"the role plugin {namespace!r} ({describe_origin(entry)}) has no {noun}s: no hook {hook}()"
        )
    if short not in targets:
        names_text = f"it has {join_words([repr(key) for key in sorted(targets)])}" if targets else "it has none"
        hint = _colon_hint(name) or did_you_mean(short, targets)
        message = f"{namespace!r} ({describe_origin(entry)}) has no {noun} {short!r}: {names_text}{hint}"
        raise entry_error(entry, message)
    return kind(name, targets[short], *distribution_of(entry), entry)


def _colon_hint(name: str) -> str:
    """Return a hint if a name is written like "module.Class", with a dot for the colon; otherwise ""."""
    module, _, attribute = name.rpartition(".")
    return f"; a class of a module is named with a colon: {module}:{attribute}" if attribute[:1].isupper() else ""


def _wrong_return(entry: EntryPoint, hook: str, found: Any, wanted: str) -> PluginError:
    text = "nothing" if found is None else f"{found!r} ({type(found).__name__})"
    return entry_error(
        entry, f"{entry.name!r} ({describe_origin(entry)}): its hook {hook}() returned {text}, not {wanted}"
    )
