"""The process of a function child: `python -m colocate.features.children.process FD NAME`.

FD is the child's end of a connection: the function arrives there with all that it needs, and then gets the connection.
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
    """The function of a child with the environment for unpickling, as sent by the worker."""

    version: str  # of colocate
    authkey: bytes  # multiprocessing's key for shared tensors
    path: list[str] | None  # the worker's sys.path; None for another interpreter
    sources: Mapping[str, Source]  # modules beside the driver's script, which may lie on another machine
    function: bytes


def main() -> None:
    """Receive the function and run the function with the connection."""
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
