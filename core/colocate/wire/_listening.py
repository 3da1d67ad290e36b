"""Listening sockets, which heal: one that is shut down from outside is made again at its address.

Nobody who knows the address need hear of that: whoever is refused dials again for a moment. Connections that waited to
be accepted are lost.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from colocate.wire._forks import track_socket

# What waits for its turn when many workers dial at once.
_BACKLOG = 1024
REOPEN_EVERY_S = 0.005
REOPENS_WITHIN_S = 0.25
# What a listener says when its process, or the machine, is full.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listening_within(host: str, ports: tuple[int, int] | None, what: str) -> socket.socket:
    """A TCP socket that listens, at some port.

    Args:
        host: The address to listen on.
        ports: The first and the last of those that may be taken; None for any that is free.
        what: What needs the port, for the error: "the keeper of a slot".

    Raises:
        OSError: No port of these is free; or it can't be listened there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return listening(family, (host, 0))
    first, last = ports
    for port in range(first, last + 1):
        try:
            return listening(family, (host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port of {first}-{last} is free on {host} for {what}: give more of them (connect(..., ports=...)), or end "
        "what has them (`ss -tlnp` lists it)",
    )


def listening(family: int, name: Any) -> socket.socket:
    """A socket that listens.

    Args:
        family: Its address family.
        name: Its address, as `bind` takes it; port 0 for any.

    Raises:
        OSError: The address is somebody else's.
    """
    sock = track_socket(socket.socket(family))
    try:
        if family != socket.AF_UNIX and name[1] != 0:  # otherwise a port is chosen that is nobody's
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        # The connections inherit it, and so don't keep the address taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
