"""`colocate --version` and shell completion, which neither connect to a cluster nor import a plugin."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from itertools import islice

from colocate.plugins import PROTOCOL, VERSION, PluginInfo, plugins

_DEEP = 2  # How many levels of folders are searched for configs.
_LOOKS = 2000  # The most paths that are examined, because the shell waits for the completion.


def configs(incomplete: str) -> list[str]:
    """Return YAML files that begin with `incomplete`, up to two folders deep.

    Without a match, shells offer all files.
    """
    folder, _, start = incomplete.rpartition("/")
    folder = f"{folder}/" if "/" in incomplete else ""
    return sorted(
        path for path in islice(_list_files(folder, start, _DEEP), _LOOKS) if path.endswith((".yaml", ".yml"))
    )


def _list_files(folder: str, start: str, deep: int) -> Iterator[str]:
    """Yield the paths below a folder if the first part begins with `start`; upper levels come first."""
    try:
        entries = [entry for entry in os.scandir(folder or ".") if _matches_start(entry.name, start)]
    except OSError:
        return
    below = []
    for entry in entries:
        yield f"{folder}{entry.name}"
        if deep and entry.is_dir(follow_symlinks=False):
            below.append(entry.name)
    for name in below:
        yield from _list_files(f"{folder}{name}/", "", deep - 1)


def _matches_start(name: str, start: str) -> bool:
    return name.startswith(start) and not (name.startswith(".") and not start)


def executors(incomplete: str) -> list[tuple[str, str]]:
    """Return the names and distributions of executors that complete a word."""
    return [
        (plugin.name, plugin.origin)
        for plugin in plugins()
        if plugin.kind == "executor" and plugin.name.startswith(incomplete)
    ]


def plugin_names(incomplete: str) -> list[tuple[str, str]]:
    """Return the names, kinds and distributions of plugins that complete a word."""
    return [
        (plugin.name, f"{plugin.brings}: {plugin.origin}") for plugin in plugins() if plugin.name.startswith(incomplete)
    ]


def version_lines() -> Iterator[str]:
    """Yield the lines of `--version`, without importing an executor."""
    yield f"colocate {VERSION} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield f"executors: {', '.join(_engine_version(plugin) for plugin in plugins() if plugin.kind == 'executor')}"


def _engine_version(plugin: PluginInfo) -> str:
    needed = plugin.engine()
    if not needed:
        return plugin.name
    versions = [f"{name} {version or 'is not installed'}" for name, version in needed.items()]
    return f"{plugin.name} ({', '.join(versions)})"
