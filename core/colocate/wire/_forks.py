"""In a forked child the wire closes its copies of the parent's sockets, so that a fork keeps no connection alive.

Only descriptors are closed: nothing is sent, no callback runs, no lock of the parent is taken.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol, TypeVar

S = TypeVar("S", bound=socket.socket)


class Forgetful(Protocol):
    """What can drop everything it inherited through a fork."""

    def forget(self) -> None:
        """Close the child's copies of descriptors, and refuse further use."""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_live: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def track_socket(sock: S) -> S:
    """Close this socket in forked children."""
    _sockets.add(sock)
    return sock


def own_descriptors() -> set[int]:
    """The descriptors of all sockets of the wire."""
    return {sock.fileno() for sock in list(_sockets)}


def track(thing: Forgetful) -> None:
    """Call its `forget` in forked children."""
    _live.add(thing)


def _in_child() -> None:
    for thing in list(_live):
        thing.forget()
    for sock in list(_sockets):
        sock.close()
    _live.clear()
    _sockets.clear()


os.register_at_fork(after_in_child=_in_child)
