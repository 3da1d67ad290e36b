"""One entry-point group: its plugins are found by metadata, imported one by one, and errors say whose fault it is."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from types import CodeType
from typing import Any

import attrs
import pluggy

from colocate._system.installed import distribution_line, name_and_version, pip_line, version_of, without_metadata
from colocate._system.lines import is_own_code
from colocate._system.nearest import did_you_mean, nearest
from colocate.errors import PluginError

hookspec = pluggy.HookspecMarker("colocate")
hookimpl = pluggy.HookimplMarker("colocate")

ENTRY_GROUPS = ("colocate.executors", "colocate.roles", "colocate.observers")
RAISED = (Exception, SystemExit)
"""What plugin code may raise while it is imported or asked: a module that ends the interpreter is broken, too."""


def let_through(error: BaseException) -> None:
    """Raise it again if a handler of a signal has raised it, which runs between any two steps of the main thread."""
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    plain = getattr(handler, "__func__", handler)
    found = getattr(plain, "__code__", None) or getattr(vars(type(plain)).get("__call__"), "__code__", None)
    return found if isinstance(found, CodeType) else None


@attrs.define(eq=False)
class PluginGroup:
    """One entry-point group with the manager of its imported plugins.

    Attributes:
        entry_group: The group's name in metadata.
        noun: What one of its plugins is called in messages.
        hooks: The class that specifies its hooks.
    """

    entry_group: str
    noun: str
    hooks: type
    manager: pluggy.PluginManager = attrs.field(init=False)
    _read: tuple[object, list[EntryPoint]] = attrs.field(default=(None, []), init=False)

    def __attrs_post_init__(self) -> None:
        self.manager = pluggy.PluginManager("colocate")
        self.manager.add_hookspecs(self.hooks)

    def entries(self) -> list[EntryPoint]:
        """The entry points there are now, imported or not, by name."""
        installed = _installed()
        if self._read[0] != installed:
            found = sorted(entry_points(group=self.entry_group), key=lambda entry: (entry.name, origin(entry)))
            self._read = installed, found
        return list(self._read[1])

    def find(self, name: str) -> EntryPoint:
        """The one entry of this name.

        Raises:
            PluginError: There is none, or more than one.
        """
        entries = self.entries()
        matching = [entry for entry in entries if entry.name == name]
        if not matching:
            raise self._misplaced(name) or unknown_plugin(self.noun, name, sorted({entry.name for entry in entries}))
        if len(matching) > 1:
            raise self._claimed_twice(name, matching)
        return matching[0]

    def implements(self, entry: EntryPoint, hook: str) -> bool:
        """Whether the plugin has an implementation of a hook. Imports this plugin only.

        Raises:
            PluginError: It can't be imported, or isn't valid.
        """
        return bool(self._implementations(entry, hook))

    def call(self, entry: EntryPoint, hook: str) -> Any:
        """What the plugin's implementation of a hook returns; None when it has none. Imports this plugin only.

        Raises:
            PluginError: It can't be imported, isn't valid, or its hook raises.
        """
        found = self._implementations(entry, hook)
        if not found:
            return None
        try:
            return found[0].function()
        except RAISED as error:
            let_through(error)
            raise broken(f"{self._plugin(entry)}:", f"its hook {hook}() raised", error, entry) from error

    def _implementations(self, entry: EntryPoint, hook: str) -> list[pluggy.HookImpl]:
        plugin = self._load(entry)
        return [each for each in getattr(self.manager.hook, hook).get_hookimpls() if each.plugin is plugin]

    def _plugin(self, entry: EntryPoint) -> str:
        return f"the {self.noun} {entry.name!r} ({origin(entry)})"

    def _load(self, entry: EntryPoint) -> object:
        try:
            plugin: object = entry.load()
        except RAISED as error:
            let_through(error)
            what = self._plugin(entry)
            if not _place(error):  # it is the entry point itself that leads nowhere
                what += f", entry point {entry.name} = {entry.value},"
            raise broken(what, "can't be imported", error, entry) from error
        if self.manager.get_plugin(entry.name) is plugin:
            return plugin
        if self.manager.has_plugin(entry.name):
            self.manager.unregister(name=entry.name)
        try:
            self.manager.register(plugin, entry.name)
            self.manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            # What isn't valid must not stay: the next plugin's check would trip over it.
            if self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise self._invalid(entry, plugin, error) from error
        if self.manager.get_hookcallers(plugin):
            return plugin
        self.manager.unregister(plugin)
        raise self._invalid(entry, plugin, None)

    def _invalid(self, entry: EntryPoint, plugin: object, error: Exception | None) -> PluginError:
        valid = [name for name in vars(self.hooks) if name.startswith("colocate_")]
        present = [name for name in dir(plugin) if name.startswith("colocate_") and callable(getattr(plugin, name))]
        marked = [name for name in dir(plugin) if self.manager.parse_hookimpl_opts(plugin, name) is not None]
        for name in marked:
            if name not in valid:
                near = nearest(name, valid, 0.0)
                why = f"has a hook {name!r}, which doesn't exist; did you mean {near!r}?"
                return entry_error(entry, f"{self._plugin(entry)} {why}")
        if error is not None:
            return entry_error(entry, f"{self._plugin(entry)} is not valid: {error}")
        why = f"implements no hook; it needs {listed(valid, 'or')}, marked with @colocate.hookimpl"
        if present:
            why = f"has {present[0]}(), but it isn't marked with @colocate.hookimpl"
        elif entry.attr:
            why += f": its entry point names {entry.value}, where mostly the module stands, {entry.module}"
        return entry_error(entry, f"{self._plugin(entry)} {why}")

    def _misplaced(self, name: str) -> PluginError | None:
        """The error when an entry point of this name is in a group that only looks like colocate's."""
        for entry in entry_points(name=name):
            if entry.group.startswith("colocate") and entry.group not in ENTRY_GROUPS:
                where = f"in the group {entry.group!r}, which isn't read; it belongs in {self.entry_group!r}"
                return entry_error(entry, f"no {self.noun} is called {name!r}: {origin(entry)} has it {where}")
        return None

    def _claimed_twice(self, name: str, entries: list[EntryPoint]) -> PluginError:
        last = distribution_name(entries[-1])
        hint = f"pip uninstall {last}" if last is not None else None
        message = f"the {self.noun} {name!r} is claimed by {listed([origin(entry) for entry in entries])}"
        message += f"; keep one, for example: {hint}" if hint else "; keep one"
        return PluginError(message, name=name, distribution=distribution_name(entries[0]), hint=hint)


def _installed() -> object:
    """Equal as long as no distribution comes or goes: that writes to a folder of the path, as a listing of it knows."""
    folders = []
    for path in sys.path:
        try:
            found = os.stat(path or ".")
        except OSError:
            folders.append((path, 0, 0))
        else:
            folders.append((path, found.st_ino, found.st_mtime_ns))
    return folders, [id(finder) for finder in sys.meta_path]


def origin(entry: EntryPoint) -> str:
    """The distribution of an entry with its version."""
    if entry.dist is None:
        return "no distribution"
    known = name_and_version(entry.dist)
    return " ".join(known) if known is not None else without_metadata(entry.dist)


def distribution_name(entry: EntryPoint | None) -> str | None:
    """The distribution's name, if there is one that tells."""
    return distribution_of(entry)[0] if entry is not None else None


def distribution_of(entry: EntryPoint) -> tuple[str | None, str | None]:
    """The distribution's name and version, if there is one that tells."""
    known = name_and_version(entry.dist) if entry.dist is not None else None
    return known or (None, None)


def unknown_plugin(noun: str, name: str, known: Collection[str]) -> PluginError:
    """The error for a name that no plugin has.

    Args:
        noun: What such a plugin is called in messages.
        name: The name.
        known: Those that there are.
    """
    there = f"installed: {listed(known)}" if known else "none is installed"
    message = f"no {noun} is called {name!r} ({there}){did_you_mean(name, known)}"
    hint = None
    if name in extras_of("colocate"):
        hint = pip_line(name)
        message += f"; install it: {hint}"
    elif not nearest(name, known):
        message += "; install the distribution that has it"
    return PluginError(message, name=name, hint=hint)


def entry_error(entry: EntryPoint, message: str, hint: str | None = None) -> PluginError:
    """The error about one plugin."""
    return PluginError(message, name=entry.name, distribution=distribution_name(entry), hint=hint)


def broken(what: str, how: str, error: BaseException, entry: EntryPoint | None) -> PluginError:
    """The error for plugin code that raised: whose it is, what it said and where, and what to install."""
    message = f"{what} {how}: {type(error).__name__}: {error}{_place(error)}"
    hint = _cure(entry, error) if entry is not None else None
    if hint:
        message += f"; install what it needs: {hint}"
    name = entry.name if entry is not None else None
    return PluginError(message, name=name, distribution=distribution_name(entry), hint=hint)


def import_reference(reference: str, what: str, entry: EntryPoint | None) -> Any:
    """The object that "module:name" stands for.

    Raises:
        PluginError: The module can't be imported, or has no such name.
    """
    module_name, _, path = reference.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = ".".join(part for part in module_name.removesuffix(".py").split("/") if part.strip("."))
        message = f"{what} names a file; write its module: {dotted}:{path}"
        raise PluginError(message, name=reference, distribution=distribution_name(entry))
    try:
        found: Any = importlib.import_module(module_name)
    except RAISED as error:
        let_through(error)
        raise broken(f"{what}: module {module_name}", "can't be imported", error, entry) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            names = [each for each in dir(found) if not each.startswith("_")]
            message = f"{what}: module {module_name} has no {name!r}{did_you_mean(name, names)}"
            owner = distribution_name(entry)
            raise PluginError(message, name=reference, distribution=owner) from None
    return found


def _cure(entry: EntryPoint, error: BaseException) -> str | None:
    """What installs what an import error of this plugin misses; None when metadata doesn't tell.

    By convention an extra is named like the entry point; otherwise the requirement that fits the module is looked for.
    """
    missing = _missing_module(error)
    owner = distribution_name(entry)
    if entry.dist is None or owner is None or missing is None or missing == entry.module.partition(".")[0]:
        return None
    if entry.name in extras_of(entry.dist):
        return distribution_line(owner, entry.name)
    for requirement in entry.dist.requires or ():
        if _project(requirement) == _normalized(missing):
            return distribution_line(owner, _extra(requirement))
    return None


def needed_by_extra(owner: str, extra: str) -> Mapping[str, str | None]:
    """What an extra of a distribution names, with the version that is installed; None where it isn't."""
    requirements = distribution(owner).requires or ()
    return versions_of(_project(requirement) for requirement in requirements if _extra(requirement) == extra)


def versions_of(names: Iterable[str]) -> Mapping[str, str | None]:
    """The versions of some distributions; None for one that isn't installed."""
    return {name: version_of(name) for name in names}


def extras_of(owner: Distribution | str) -> Collection[str]:
    """The extras that a distribution declares."""
    if isinstance(owner, str):
        try:
            owner = distribution(owner)
        except PackageNotFoundError:
            return ()
    return owner.metadata.get_all("Provides-Extra") or ()


def listed(names: Collection[str], last: str = "and") -> str:
    """The names as a sentence lists them."""
    words = list(names)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _missing_module(error: BaseException) -> str | None:
    """The top-level module that an import error, or one of its causes, says is missing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ModuleNotFoundError) and seen.name:
            return seen.name.partition(".")[0]
        seen = seen.__cause__ or seen.__context__
    return None


# Folders of what imports entry points; with the backport installed, that serves them instead of Python's own.
_IMPORTING = ("importlib", "metadata", "importlib_metadata")


def _place(error: BaseException) -> str:
    """Where it was raised, when that is a file of somebody's and not the import system itself."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    frames = [f for f in frames if Path(f.filename).parent.name not in _IMPORTING and not is_own_code(f.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _extra(requirement: str) -> str | None:
    found = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return found[1] if found else None


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return _normalized(found[0]) if found else ""


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
