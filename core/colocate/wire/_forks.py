"""Close the wire's inherited sockets in a forked child, so that a fork keeps no connection alive.

Only descriptors are closed: nothing is sent, no callback runs, and no lock of the parent is taken.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol, TypeVar

S = TypeVar("S", bound=socket.socket)


class ForkAware(Protocol):
    """An object that releases inherited descriptors in a forked child."""

    def close_after_fork(self) -> None:
        """Close inherited descriptors in the child, and refuse further use."""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_live: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def track_socket(sock: S) -> S:
    """Register a socket to be closed in forked children, and return the socket."""
    _sockets.add(sock)
    return sock


def is_tracked(fd: int) -> bool:
    """Return whether a descriptor belongs to a tracked socket."""
    return any(sock.fileno() == fd for sock in list(_sockets))


def track(thing: ForkAware) -> None:
    """Register an object whose `close_after_fork` is called in forked children."""
    _live.add(thing)


def _close_inherited() -> None:
    errors: list[Exception] = []
    for closing in (*(thing.close_after_fork for thing in list(_live)), *(sock.close for sock in list(_sockets))):
        try:
            closing()
        except Exception as error:  # Continue, because an open socket would keep the parent's connection alive.
            errors.append(error)
    _live.clear()
    _sockets.clear()
    if errors:  # Python prints only the text of an exception that is raised here.
        text = "; ".join(f"{type(error).__name__}: {error}" for error in errors)
        raise ExceptionGroup(f"not all connections of the parent could be closed in a forked child ({text})", errors)


os.register_at_fork(after_in_child=_close_inherited)
