"""`colocate --version`: of colocate, of what its workers speak, of Python, and of the engines that are installed."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import colocate
from colocate.driver import PROTOCOL
from colocate.plugins import PluginInfo, plugins


def lines() -> Iterator[str]:
    """What it says. No executor is imported for it."""
    yield f"colocate {colocate.__version__} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield f"executors: {', '.join(_engine(plugin) for plugin in plugins() if plugin.kind == 'executor')}"


def _engine(plugin: PluginInfo) -> str:
    needed = plugin.engine()
    if not needed:
        return plugin.name
    versions = [f"{name} {version or 'is not installed'}" for name, version in needed.items()]
    return f"{plugin.name} ({', '.join(versions)})"
