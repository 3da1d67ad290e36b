"""How a role's class or a function gets to the workers: by its name where that leads to it, else as a definition."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Any

from colocate import wire
from colocate._definitions.names import is_installed, path_of
from colocate._system.installed import version_of
from colocate.worker.serving.build import Shipped


def ship(
    thing: Any, name: str, *, in_process: bool, distribution: str | None = None, version: str | None = None
) -> Shipped:
    """The class or function as it travels.

    Args:
        thing: The class or function.
        name: What errors call it, where it has no name that can be imported.
        in_process: The workers are threads of this process: nothing travels.
        distribution: Where a plugin's entry point has it from.
        version: That distribution's version.

    Raises:
        Exception: It can't be pickled; only something that is neither a class nor a function can't.
    """
    if in_process:
        return Shipped(name, cls=thing)
    path = path_of(thing)
    if path is None:
        return Shipped(name, data=wire.pack(thing))
    if distribution is None and is_installed(sys.modules[path[0]]):
        distribution, version = _distribution(path[0].partition(".")[0])
    return Shipped(":".join(path), distribution=distribution, version=version)


@functools.cache
def _distribution(package: str) -> tuple[str | None, str | None]:
    """The distribution that an import package belongs to, and its version; None where metadata doesn't tell."""
    if (version := version_of(package)) is not None:
        return package, version
    try:
        names = importlib.metadata.packages_distributions().get(package) or [""]
    except FileNotFoundError:  # some distribution has lost its metadata, and importlib_metadata raises it
        return None, None
    return (names[0], version_of(names[0])) if names[0] else (None, None)
