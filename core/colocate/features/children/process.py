"""The program that runs a role's function in a child process, `python -m colocate.features.children.process FD NAME`.

FD is the child's end of a connection. The worker sends the function, and the function's argument is the connection.
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
from colocate.worker.birth.imports import DriverModuleFinder
from colocate.worker.birth.signals import ignore_driver_signals, install_end_handler


class ChildStart(NamedTuple):
    """The worker's first message to a child process: a pickled function, and the settings that unpickling needs."""

    version: str  # The worker's version of colocate.
    authkey: bytes  # The worker's key of multiprocessing, which shared tensors need.
    path: list[str] | None  # The worker's `sys.path`; None if the child runs another interpreter.
    sources: Mapping[str, Source]  # Modules from the folder of the driver's script, which may be on another machine.
    function: bytes


def main() -> None:
    """Receive the function from the worker, and call the function with the connection."""
    ignore_driver_signals()
    install_end_handler()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    connection: Any = Connection(fd)
    version, *rest = connection.recv()
    if version != __version__:
        sys.exit(f"{sys.executable} has colocate {__version__}, and the worker {version}: install the same one there")
    start = ChildStart(version, *rest)
    multiprocessing.current_process().authkey = start.authkey
    sys.path[:] = start.path or sys.path
    modules = DriverModuleFinder(lambda name: {})
    modules.add_sources(start.sources)
    sys.meta_path.insert(0, modules)
    function: Callable[[Any], object] = pickle.loads(start.function)
    function(connection)


if __name__ == "__main__":
    main()
