"""Find the plugins of an entry-point group by metadata, and import them one by one on use."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pluggy

from colocate._signals.guard import calls_users_code
from colocate._system.installed import (
    describe_lost_metadata,
    get_distribution_line,
    get_pip_line,
    get_version,
    read_name_and_version,
)
from colocate._system.lines import is_own_code
from colocate._system.nearest import did_you_mean, find_nearest
from colocate._system.tracebacks import is_of_handler
from colocate.errors import PluginError

hookspec = pluggy.HookspecMarker("colocate")
hookimpl = pluggy.HookimplMarker("colocate")

ENTRY_GROUPS = ("colocate.executors", "colocate.roles", "colocate.observers", "colocate.engines")
RAISED = (Exception, SystemExit)
"""Exceptions of plugin code during import or a hook; a module that ends the interpreter is broken, too."""
_ALLOWED: ContextVar[Collection[str] | None] = ContextVar("_ALLOWED", default=None)


@contextlib.contextmanager
def only_plugins(names: Collection[str] | None) -> Iterator[None]:
    """In a block, allow only plugins with these names and colocate's own plugins; None allows all plugins."""
    token = _ALLOWED.set(names)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@attrs.define(eq=False)
class PluginGroup:
    """One entry-point group, and the manager of the group's imported plugins.

    Attributes:
        entry_group: The group's name in metadata.
        noun: The word for one of the group's plugins in messages.
        hooks: The class that specifies the group's hooks.
    """

    entry_group: str
    noun: str
    hooks: type
    manager: pluggy.PluginManager = attrs.field(init=False)
    _entry_cache: tuple[object, list[EntryPoint]] = attrs.field(default=(None, []), init=False)

    def __attrs_post_init__(self) -> None:
        self.manager = pluggy.PluginManager("colocate")
        self.manager.add_hookspecs(self.hooks)

    def entries(self) -> list[EntryPoint]:
        """Return the current entry points, imported or not, sorted by name."""
        # Metadata is slow to read, so the entries are stored until a folder of `sys.path` has changed.
        folders: list[object] = [(*sys.path,), [id(finder) for finder in sys.meta_path]]
        for path in sys.path:
            with contextlib.suppress(OSError):
                status = os.stat(path or ".")
                folders.append((path, status.st_ino, status.st_mtime_ns))
        if self._entry_cache[0] != folders:
            entries = sorted(
                entry_points(group=self.entry_group), key=lambda entry: (entry.name, describe_origin(entry))
            )
            self._entry_cache = folders, entries
        return list(self._entry_cache[1])

    def find(self, name: str) -> EntryPoint:
        """Return the only entry point of this name, or raise PluginError."""
        entries = self.entries()
        matching = [entry for entry in entries if entry.name == name]
        if not matching:
            for entry in entry_points(name=name):
                # The name of the entry-point group is misspelt.
                if entry.group.startswith("colocate") and entry.group not in ENTRY_GROUPS:
                    where = f"in the group {entry.group!r}, which isn't read; it belongs in {self.entry_group!r}"
                    raise entry_error(
                        entry, f"no {self.noun} is called {name!r}: {describe_origin(entry)} has it {where}"
                    )
            raise unknown_plugin(self.noun, name, sorted({entry.name for entry in entries}))
        if len(matching) > 1:
            last = distribution_of(matching[-1])[0]
            hint = f"pip uninstall {last}" if last is not None else None
            message = (
                f"the {self.noun} {name!r} is claimed by {join_words([describe_origin(entry) for entry in matching])}"
            )
            message += f"; keep one, for example: {hint}" if hint else "; keep one"
            raise entry_error(matching[0], message, hint)
        (entry,), allowed = matching, _ALLOWED.get()
        if allowed is not None and name not in allowed and distribution_of(entry)[0] != "colocate":
            why = "isn't in plugins.allow: add it there if you trust it"
            raise entry_error(entry, f"plugin {name!r} ({describe_origin(entry)}) {why}")
        return entry

    def call_hook(self, entry: EntryPoint, hook: str, without: Any = None) -> Any:
        """Import a plugin and return the result of a hook, or the argument `without` if the plugin lacks the hook."""
        plugin = self._load_plugin(entry)
        implementations = [
            candidate for candidate in getattr(self.manager.hook, hook).get_hookimpls() if candidate.plugin is plugin
        ]
        if not implementations:
            return without
        try:
            return implementations[0].function()
        except RAISED as error:
            raise_broken(f"{self._describe_plugin(entry)}:", f"its hook {hook}() raised", error, entry)

    def _describe_plugin(self, entry: EntryPoint) -> str:
        return f"the {self.noun} {entry.name!r} ({describe_origin(entry)})"

    @calls_users_code
    def _load_plugin(self, entry: EntryPoint) -> object:
        try:
            plugin: object = entry.load()
        except RAISED as error:
            label = self._describe_plugin(entry)
            if not _describe_place(error):  # The entry point itself names a missing module or object.
                label += f", entry point {entry.name} = {entry.value},"
            raise_broken(label, "can't be imported", error, entry)
        if self.manager.get_plugin(entry.name) is plugin:
            return plugin
        if self.manager.has_plugin(entry.name):
            self.manager.unregister(name=entry.name)
        try:
            self.manager.register(plugin, entry.name)
            self.manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            # Unregister an invalid plugin, because otherwise the next plugin's check would fail.
            if self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise self._invalid_error(entry, plugin, error) from error
        if self.manager.get_hookcallers(plugin):
            return plugin
        self.manager.unregister(plugin)
        raise self._invalid_error(entry, plugin, None)

    def _invalid_error(self, entry: EntryPoint, plugin: object, error: Exception | None) -> PluginError:
        valid = [name for name in vars(self.hooks) if name.startswith("colocate_")]
        present = [name for name in dir(plugin) if name.startswith("colocate_") and callable(getattr(plugin, name))]
        marked = [name for name in dir(plugin) if self.manager.parse_hookimpl_opts(plugin, name) is not None]
        for name in marked:
            if name not in valid:
                near = find_nearest(name, valid, 0.0)
                why = f"has a hook {name!r}, which doesn't exist; did you mean {near!r}?"
                return entry_error(entry, f"{self._describe_plugin(entry)} {why}")
        if error is not None:
            return entry_error(entry, f"{self._describe_plugin(entry)} is not valid: {error}")
        why = f"implements no hook; it needs {join_words(valid, 'or')}, marked with @colocate.hookimpl"
        if present:
            why = f"has {present[0]}(), but it isn't marked with @colocate.hookimpl"
        elif entry.attr:
            why += f": its entry point names {entry.value}, where mostly the module stands, {entry.module}"
        return entry_error(entry, f"{self._describe_plugin(entry)} {why}")


def describe_origin(entry: EntryPoint) -> str:
    """Return the name and version of an entry point's distribution, as text."""
    if entry.dist is None:
        return "no distribution"
    name_version = read_name_and_version(entry.dist)
    return " ".join(name_version) if name_version is not None else describe_lost_metadata(entry.dist)


def distribution_of(entry: EntryPoint | None) -> tuple[str | None, str | None]:
    """Return the name and version of an entry point's distribution, if known."""
    name_version = read_name_and_version(entry.dist) if entry is not None and entry.dist is not None else None
    return name_version or (None, None)


def unknown_plugin(noun: str, name: str, known: Collection[str]) -> PluginError:
    """Return the error for an unknown plugin name, with the most similar of the `known` names."""
    names_text = f"installed: {join_words(known)}" if known else "none is installed"
    message = f"no {noun} is called {name!r} ({names_text}){did_you_mean(name, known)}"
    hint = None
    if name in extras_of("colocate"):
        hint = get_pip_line(name)
        message += f"; install it: {hint}"
    elif not find_nearest(name, known):
        message += "; install the distribution that has it"
    return PluginError(message, name=name, hint=hint)


def entry_error(entry: EntryPoint, message: str, hint: str | None = None) -> PluginError:
    return PluginError(message, name=entry.name, distribution=distribution_of(entry)[0], hint=hint)


def raise_broken(what: str, how: str, error: BaseException, entry: EntryPoint | None) -> NoReturn:
    """Raise a PluginError that names a plugin, the error in the plugin's code, and the packages to install.

    For a missing module the message is complete, so the traceback is dropped. A signal handler's error that
    interrupted the plugin's code is raised unchanged.
    """
    if is_of_handler(error):
        raise error
    message = f"{what} {how}: {type(error).__name__}: {error}{_describe_place(error)}"
    hint = _find_install_hint(entry, error) if entry is not None else None
    if hint:
        message += f"; install what it needs: {hint}"
    name = entry.name if entry is not None else None
    refusal = PluginError(message, name=name, distribution=distribution_of(entry)[0], hint=hint)
    raise refusal from (None if hint else error)


@calls_users_code
def import_reference(reference: str, what: str, entry: EntryPoint | None) -> Any:
    """Import and return the object named "module:name"; raise PluginError if that fails."""
    module_name, _, path = reference.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = ".".join(part for part in module_name.removesuffix(".py").split("/") if part.strip("."))
        message = f"{what} names a file; write its module: {dotted}:{path}"
        raise PluginError(message, name=reference, distribution=distribution_of(entry)[0])
    try:
        target: Any = importlib.import_module(module_name)
    except RAISED as error:
        raise_broken(f"{what}: module {module_name}", "can't be imported", error, entry)
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            names = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            message = f"{what}: module {module_name} has no {name!r}{did_you_mean(name, names)}"
            owner = distribution_of(entry)[0]
            raise PluginError(message, name=reference, distribution=owner) from None
    return target


def _find_install_hint(entry: EntryPoint, error: BaseException) -> str | None:
    """Return the command that installs the module missing in an import error; None if unknown.

    By convention an extra has the entry point's name; otherwise the requirement that fits the module counts.
    """
    missing: str | None = None
    cause: BaseException | None = error
    while missing is None and cause is not None:  # The missing module is named in the error or in one of the causes.
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            missing = cause.name.partition(".")[0]
        cause = cause.__cause__ or cause.__context__
    owner = distribution_of(entry)[0]
    if entry.dist is None or owner is None or missing is None or missing == entry.module.partition(".")[0]:
        return None
    if entry.name in extras_of(entry.dist):
        return get_distribution_line(owner, entry.name)
    required = list(_requirements(entry.dist))
    extras = [extra for project, extra in required if project == _normalized(missing)]
    if not extras:
        return None
    sizes = Counter(extra for _, extra in required)
    # Several extras may require the module: take the extra with the fewest requirements.
    return get_distribution_line(owner, min(extras, key=lambda extra: sizes[extra]))


def needed_by_extra(owner: str, extra: str) -> Mapping[str, str | None]:
    """Return the installed version of each distribution that an extra requires; None for a missing distribution."""
    return versions_of(project for project, of in _requirements(distribution(owner)) if of == extra)


def _requirements(owner: Distribution) -> Iterator[tuple[str, str | None]]:
    """Yield each project that a distribution requires, with the extra that requires the project, if any."""
    for requirement in owner.requires or ():
        project = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        yield _normalized(project[0]) if project else "", extra[1] if extra else None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions_of(names: Iterable[str]) -> Mapping[str, str | None]:
    """Return the installed version of each distribution; None for a missing distribution."""
    return {name: get_version(name) for name in names}


def extras_of(owner: Distribution | str) -> Collection[str]:
    if isinstance(owner, str):
        try:
            owner = distribution(owner)
        except PackageNotFoundError:
            return ()
    return owner.metadata.get_all("Provides-Extra") or ()


def join_words(names: Collection[str], last: str = "and") -> str:
    """Join names as in a sentence, for example "a, b and c"."""
    words = list(names)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


# Folders of import code: Python's own, and the backport importlib_metadata, which may be installed.
_IMPORTING = ("importlib", "metadata", "importlib_metadata")


def _describe_place(error: BaseException) -> str:
    """Return the file and line of a plugin's code that raised, as text, or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    frames = [f for f in frames if Path(f.filename).parent.name not in _IMPORTING and not is_own_code(f.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
