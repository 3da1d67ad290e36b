"""List abstract Unix sockets, by which processes of a machine find each other, and identify the users of peers."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # The fields are the process id, user id and group id of a peer.


def listening(name: str) -> list[re.Match[str]]:
    """Match a regular expression with the names of all listening abstract sockets; return the matches.

    Args:
        name: A regular expression for the socket's name.
    """
    listed = Path("/proc/net/unix").read_text(errors="replace")
    return [*re.finditer(rf"^\S+ \S+ \S+ 00010000 .* @{name}$", listed, re.MULTILINE)]


def user_of(sock: socket.socket) -> int:
    """Return the user id of a socket's peer, as reported by the kernel."""
    user: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user
