"""`colocate --version`, and what a shell offers at the Tab key. Nothing is connected to, no plugin imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from itertools import islice

from colocate.plugins import PROTOCOL, VERSION, PluginInfo, plugins

_DEEP = 2  # folders below the one that is named
_LOOKS = 2000  # files and folders: a shell waits


def configs(incomplete: str) -> list[str]:
    """YAML files that begin so, in the folder that it names and a little below; without any, shells offer all files."""
    folder, _, start = incomplete.rpartition("/")
    folder = f"{folder}/" if "/" in incomplete else ""
    return sorted(found for found in islice(_files(folder, start, _DEEP), _LOOKS) if found.endswith((".yaml", ".yml")))


def _files(folder: str, start: str, deep: int) -> Iterator[str]:
    """Names of files and folders whose first part begins with `start`; the files of a folder before those below it."""
    try:
        entries = [entry for entry in os.scandir(folder or ".") if _fits(entry.name, start)]
    except OSError:
        return
    below = []
    for entry in entries:
        yield f"{folder}{entry.name}"
        if deep and entry.is_dir(follow_symlinks=False):
            below.append(entry.name)
    for name in below:
        yield from _files(f"{folder}{name}/", "", deep - 1)


def _fits(name: str, start: str) -> bool:
    return name.startswith(start) and not (name.startswith(".") and not start)


def executors(incomplete: str) -> list[tuple[str, str]]:
    """Executors, with what they come from."""
    return [
        (each.name, each.origin) for each in plugins() if each.kind == "executor" and each.name.startswith(incomplete)
    ]


def plugin_names(incomplete: str) -> list[tuple[str, str]]:
    """Plugins, with what they bring."""
    return [(each.name, f"{each.brings}: {each.origin}") for each in plugins() if each.name.startswith(incomplete)]


def versions() -> Iterator[str]:
    """Yield the lines of `--version`. No executor is imported for them."""
    yield f"colocate {VERSION} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield f"executors: {', '.join(_engine(plugin) for plugin in plugins() if plugin.kind == 'executor')}"


def _engine(plugin: PluginInfo) -> str:
    needed = plugin.engine()
    if not needed:
        return plugin.name
    versions = [f"{name} {version or 'is not installed'}" for name, version in needed.items()]
    return f"{plugin.name} ({', '.join(versions)})"
