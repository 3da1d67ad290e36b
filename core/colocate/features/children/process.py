"""The process of a function that a role has started: `python -m colocate.features.children.process FD NAME`.

The descriptor is its end of a connection, on which comes what the function needs, and which the function has then.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from colocate._definitions.sources import Source
from colocate._version import __version__
from colocate.worker.birth.imports import DriversModules
from colocate.worker.birth.signals import end_when_asked, leave_to_the_driver


class Start(NamedTuple):
    """What it needs."""

    version: str  # colocate's
    authkey: bytes  # multiprocessing's, by which tensors are shared
    path: list[str] | None  # where this is the worker's Python
    sources: Mapping[str, Source]  # modules beside the driver's script, which may be on another machine
    function: bytes


def main() -> None:
    """Run the function."""
    leave_to_the_driver()
    end_when_asked()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    connection: Any = Connection(fd)
    version, *rest = connection.recv()
    if version != __version__:
        sys.exit(f"{sys.executable} has colocate {__version__}, and the worker {version}: install the same one there")
    start = Start(version, *rest)
    multiprocessing.current_process().authkey = start.authkey
    sys.path[:] = start.path or sys.path
    modules = DriversModules(lambda name: {})
    modules.know(start.sources)
    sys.meta_path.insert(0, modules)
    function: Callable[[Any], object] = pickle.loads(start.function)
    function(connection)


if __name__ == "__main__":
    main()
